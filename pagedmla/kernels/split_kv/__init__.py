"""What the backends that cut keys by a plan on the device share: the plan before their decode kernel, the merge after it.

schedule.py      the work plan: which program attends to what, made on the device
grid.py          how many programs and partial states
workspace.py     where the plan and the partial states lie
merge.py         unites the partial states
launch.py        sizes a call, launches the plan and the merge
direct.py        launches kernels, and makes launches repeatable without Triton's part of the way
variants.py, offline.py, resources.py   what there is to compile, for GPUs that are not here, and what it needs
interpreted.py   whether kernels are interpreted instead

No backend: it decodes nothing.
"""
