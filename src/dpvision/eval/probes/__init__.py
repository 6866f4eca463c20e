"""Classification with an encoder: k-NN, linear and few-shot probes, fine-tuning, and a run's own
head.
"""
