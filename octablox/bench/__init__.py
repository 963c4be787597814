"""`octablox bench`: this machine's figures, of grouped matmuls, MoE layers and training steps."""
