"""How a model runs on the ranks: what goes with what, and the engine that the loop sees."""
