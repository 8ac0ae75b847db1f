"""Logits and their gradients for the loss (`fused_logits`), and matmuls with an output head of any
number of rows (`head_matmul`)."""
