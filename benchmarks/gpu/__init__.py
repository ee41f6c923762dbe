"""Everything to be found out on a GPU, as steps of one command: `python -m benchmarks.gpu`, or `make gpu`.

Each step is a process of its own with a time limit. A crash, a hang or a device error ends one step, and what the others
measured is in the JSON file already.

| module | contents |
| --- | --- |
| `__main__` | the command line: which steps run, in the time there is |
| `steps` | the steps, in the order of their importance |
| `process` | one step in a process group with a time limit |
| `record` | the JSON file, written after every step |
| `requirements` | a check of Python packages and device before the first step |
| `hardware` | step: rates of matrix products and of copies, latencies |
| `suite`, `outcomes` | step: pytest, started again after a test that ends its process |
| `synchronizations` | step: where the host waits for the device |
| `summary` | tables of the results |
"""
