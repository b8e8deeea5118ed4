"""Bands in any order of tokens: partial attentions merged by their log-sum-exps."""
