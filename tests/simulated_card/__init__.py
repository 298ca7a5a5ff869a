"""A card that is only pretended, on which tests that need a GPU run on a CPU.

    python -m pytest -p no:benchmark -p tests.simulated_card.plugin -m gpu tests/nn

Tensors lie in the memory of the CPU and say that they are on ``cuda:0``. What a card refuses is
refused: tensors of two devices in one operation, values that are read back while a graph is
captured. Kernels run in the emulator; graphs are recorded and replayed operation by operation. Not
shown are races, speed, compiled code, products in tf32 and several processes.
"""
