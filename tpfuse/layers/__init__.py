"""nn.Modules built from the operators: tensor- and sequence-parallel, with DTensor parameters."""
