"""The algorithm of pass split-products: which products to split, what that costs, and how to write them."""
