"""Hand-written CUDA kernels behind the operators: found, compiled, launched, or left aside.

The sources are in the folder ``kernels`` of the repository and in ``comera/_kernels`` of a wheel.
``choose`` decides whether a kernel runs, ``launch`` runs it on a card or in the emulation; only
``nvrtc`` and ``launch`` import cuda-python, and only when a kernel is wanted.
"""
