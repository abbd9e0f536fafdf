"""Computes what `diptych.architectures` describes, on torch: one decoder for all families.

What differs by processor, quantisation, ranks and adapters is behind `arithmetic.ops.Ops` and `matrices.matrix.Matrix`.
"""
