"""vLLM serves models with Multi-head Latent Attention through ``pagedmla.decode``: see docs/vllm.md.

vLLM loads ``plugin:register`` through the entry point ``vllm.general_plugins``, and ``backend`` when the backend CUSTOM is
asked for.  ``backend`` is the only module that touches vLLM's classes; what it decides and computes is in the others, which
know no vLLM and are tested without one:

versions.py   which vLLM the plug-in is for
selection.py  what is refused before a model is loaded, and in which words
capacity.py   how large a step can get
step.py       one step's tables and the call of each layer
"""
