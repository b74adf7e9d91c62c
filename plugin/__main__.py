"""``python -m scalai``: the same as ``scalai``."""

import runpy

runpy.run_module("scalai.launch.cli", run_name="__main__", alter_sys=True)
