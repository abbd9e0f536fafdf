"""One model on several ranks: each has a part of every large weight and of the KV, and computes a part of each sum."""
