"""The run time: kernels, gradients, optimizers, process groups. Private torch API is imported here."""
