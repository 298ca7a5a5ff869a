"""Hand-written CUDA kernels behind the operators; the sources are in ``kernels`` of the repository.

Only ``launch`` imports cuda-python, and only when a kernel is wanted.
"""
