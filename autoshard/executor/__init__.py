"""Apply a plan to a live model: hold, read and convert; sum partial gradients; shard; train.

``execute.apply`` is the one place that calls ``parallelize_module`` and ``fully_shard``.
"""
