"""How ranks divide one microbatch's work: tensors of a block, tokens of a sequence, experts of a mixture."""
