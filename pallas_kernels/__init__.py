"""Device kernels: arrays in, arrays out. Nothing here knows of Flax, meshes' policies, or jmoe."""
