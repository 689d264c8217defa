"""The passes, one file each, in the order in which `autoshard/pipeline.py` runs them.

=============  ======================================================================================
trace          the model's forward as one straight graph (``unroll``: repeated blocks are traced twice)
factorise      every dim over factors; contractions and blocks (``rules``: one table of op knowledge)
wrap           the modules that are FSDP units
choose_mesh    the degrees that were not pinned
cut            the factors that are cut over tp
place          the state of every value, conversions on module boundaries, gradient sums
cut_logits     whether results stay cut over their last dim, where that was asked for
localise       whether the user's code follows, on a rank's shapes (``resize``: attributes that help)
emit           the plan, repeated modules folded
=============  ======================================================================================

``factors`` and ``unify`` are the algebra that factorise, cut and place share.
"""

if __name__ != "autoshard.passes":
    raise ImportError("import autoshard.passes, not passes: loaded twice, every class would exist twice")
