"""The optimizers, one file each. `optim.make_optimizer` imports every file of this folder."""
