"""The run time: kernels, gradients, optimizers, process groups. Private torch API is used here and in capture.py only."""
