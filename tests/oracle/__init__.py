"""An independent NumPy statement of the numerics contract (docs/numerics.md).

Written from the text of the contract alone; it shares no code with the product. It is slow and literal on purpose:
every function is one rule of the contract, and its result is compared bit for bit.

Modules: ``formats`` (section 1), ``reduce`` (2), ``elementary`` (3), ``fsum16`` (4 and 5), ``quant`` (5 and 8),
``norms`` (6), ``attention``, ``moe`` and ``model`` (7); ``tiny`` has random weights to run them with. Only NumPy and
ml_dtypes are used.
"""
