"""Tensors in, tensors out: the arithmetic of tensor trains as ``torch.library`` custom ops.

Each op stands beside a plain reference, to which tests compare it.
Shape suffixes: B = batch (all leading dimensions), I = input width, O = output width,
L and R = left and right bond, N = mode.
"""
