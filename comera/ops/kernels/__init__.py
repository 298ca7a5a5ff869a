"""Hand-written CUDA kernels behind the operators; the sources are in ``kernels`` of the repository.

``choose`` decides whether a kernel runs, ``launch`` runs it on a card or in the emulation. Only
``nvrtc`` and ``launch`` import cuda-python, when a kernel is wanted.
"""
