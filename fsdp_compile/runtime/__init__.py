"""The run time: kernels, gradients, optimizers, process groups. Private torch API stays here and in capture.py."""
