"""Suites of training checkpoints: find, download, check and load them.

Input: the name of a suite (a Pythia size, a repository id, a directory, or `nano`). Output: the list of its checkpoints, and
for each a directory of verified files, a loaded model with tokenizer, and benchmark scores. Of `tracker`, this package needs
`tracker.common` alone.

| module | contents |
| --- | --- |
| `suites` | which checkpoints a suite has, by step; the place to add a suite |
| `hub` | branches and file listings from the Hugging Face hub, with an offline cache |
| `retries` | which requests to the hub are made again, and what is said if it refuses |
| `fetch` | resumable, hash-verified downloads into the hub's cache |
| `disk` | the disk budget of downloads, and eviction |
| `integrity` | suspect revisions (known defects, repeated or missing files), hashes of files, fingerprints of weights |
| `copies` | copies of a user's checkpoints, from which they are loaded, and the removal of those that killed walks left |
| `configuration` | the configurations of Pythia, and those that ask for too much memory or for code |
| `load` | models and tokenizers from a directory or a Lightning checkpoint |
| `scores` | published and users' benchmark scores, joined by step |
| `nano` | the embedded suite: a small GPT-NeoX, trained locally in about a minute |
"""
