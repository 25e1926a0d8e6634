"""Call signatures of other projects over our decode: their argument names and conventions, no kernels."""
