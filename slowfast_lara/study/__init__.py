"""The attentions trained and tested under one small budget, beside the paper's figures."""
