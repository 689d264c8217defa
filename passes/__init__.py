"""The passes, in order; see the pipeline table below."""

if __name__ != "autoshard.passes":
    raise ImportError("import autoshard.passes, not passes: loaded twice, every class would exist twice")
