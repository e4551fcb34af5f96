"""Attention estimators in models of other libraries: Hugging Face transformers, timm, PyTorch.

    from slowfast_lara import hf

    hf.use(model, "merged", groups=96)      # a model of transformers, in place
    print(hf.report(model))                 # one line per attention layer
    print(hf.compare(model, clips))         # error and cost of each estimator in this model

    with hf.replace_sdpa("merged", groups=96, prefix=1):   # a model that calls PyTorch's SDPA
        features = timm_model(images)

Importing this package needs only torch and numpy. `use`, `report` and `compare` need transformers.
"""

from slowfast_lara.hf.comparison import Comparison, compare
from slowfast_lara.hf.layouts import TokenLayout
from slowfast_lara.hf.sdpa import replace_sdpa
from slowfast_lara.hf.swap import Report, report, use

__all__ = ["Comparison", "Report", "TokenLayout", "compare", "replace_sdpa", "report", "use"]
