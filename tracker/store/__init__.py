"""Results on disk: files of measured Datasets, and the store of many."""
