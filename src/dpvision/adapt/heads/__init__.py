"""The kinds of private heads, one in each file; ``adapt.fit.KINDS`` lists them."""
