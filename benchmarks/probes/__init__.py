"""Where reuse differs from full recompute, inside the model: ``python -m benchmarks.probes``.

    drift      recurrent states and hidden states, layer by layer
    attention  K and V by distance from the ends of their segment, and where the question looks
    length     all of it over the number and the length of segments
    dtype      what storing T and S in fewer bits costs

Two engines run the plugin on one model: the one that is looked at, and one with other prefill chunks, which
computes full recompute once more.  How far the two are apart is the *noise floor*: no method can be expected
to come closer.  Every number has it beside it.
"""
