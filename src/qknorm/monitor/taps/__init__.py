"""How q and k of a layer are reached, one file per kind of model. A tap changes no result and no kernel.

Each has NAME, `serves(module)`, and `install(layer)`, which returns how to undo it.
"""

from __future__ import annotations

from qknorm.monitor.taps import functional, multihead, own, transformers, unseen

# The first that serves a module has it.
TAPS = (own, transformers, multihead, functional, unseen)
