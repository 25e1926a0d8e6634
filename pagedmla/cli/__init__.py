"""The ``pagedmla`` command: generate, info, check.

Needs the ``cli`` extra; ``generate`` needs ``transformers`` too.
"""
