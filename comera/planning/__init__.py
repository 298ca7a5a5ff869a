"""What a layer costs, and in which order it is best computed, before it runs.

Nothing here imports torch. A layer is a tensor network (``network``), and one contraction tree
gives its forward pass and all gradients (``contraction``). The ways to compute a layer
(``linear_ways``, ``lookup_ways``) are timed on a ``machine`` and ranked by the ``planner``.
``crossover`` says from how many rows the dense weight is faster than its factors, ``break_even``
where a tensor train stops paying.
"""
