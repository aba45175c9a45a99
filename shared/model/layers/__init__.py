"""A decoder's frozen linears with their adapters, its layers without their modules, and the sequences they compute."""
