"""Studies that train many models. They run from a checkout; the wheel omits them."""
