"""What a layer costs, and in which order it is best computed, before it runs.

Nothing here imports torch. A layer is a tensor network (``network``); a contraction tree, found
by ``search``, gives its forward pass and all gradients together (``schedule``); the ways to
compute a layer (``linear``, ``look_up``) are timed on a ``machine`` and ranked by the ``planner``;
``break_even`` says where a tensor train stops paying.
"""
