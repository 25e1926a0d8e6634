"""The paged latent cache, and the metadata that tells a kernel where its tokens are."""
