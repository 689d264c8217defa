"""Prove a plan: the model under it against the untouched model, simulated in one process or on local ranks.

``verification.verify`` is the way in; ``proof`` is what it returns and needs no torch.
"""
