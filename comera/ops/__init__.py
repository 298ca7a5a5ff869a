"""Operators on tensors: the arithmetic of tensor trains as ``torch.library`` custom ops.

Each operator stands beside a plain reference, with which tests compare it.
Shape suffixes: B = batch (all leading dimensions), I = input width, O = output width,
L and R = left and right bond, N = mode.
"""
