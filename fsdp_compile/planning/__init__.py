"""Planning: which schedule and which strategy, by what the cost model says of them."""
