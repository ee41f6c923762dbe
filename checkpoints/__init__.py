"""Suites of training checkpoints: find, download, check and load them.

Input: the name of a suite (a Pythia size, a repository id, a directory, or `nano`). Output: the list of its checkpoints, and
for each a directory of verified files, a loaded model with tokenizer, and benchmark scores. This package does not depend
on `tracker`.

| module | contents |
| --- | --- |
| `suites` | which checkpoints a suite has, by step; the place to add a suite |
| `hub` | branches and file listings from the Hugging Face hub, with retries and an offline cache |
| `fetch` | resumable, hash-verified downloads into the hub's cache |
| `disk` | the disk budget of downloads, and eviction |
| `identity` | whether a user's files stay the same while they are measured, and copies of them |
| `integrity` | suspect revisions (known defects, repeated or missing files) and fingerprints of weights |
| `load` | models and tokenizers from a directory or a Lightning checkpoint |
| `scores` | published and users' benchmark scores, joined by step |
| `nano` | the embedded suite: a small GPT-NeoX, trained locally in about a minute |
| `files` | atomic writes, file locks and content hashes |
| `__main__` | the commands `python -m checkpoints list` and `verify` |
"""
