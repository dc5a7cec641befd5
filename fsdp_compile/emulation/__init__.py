"""The program of a GPU, without one: fake CUDA tensors for tracing, and a described GPU for Inductor and Triton.

A process that emulates does nothing else: launch.py starts one. Nothing outside this room imports it. build.py compiles
a program and checks.py reads it; with run.py, the program runs on the CPU's memory.
"""
