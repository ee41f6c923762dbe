"""Statistics of measured Datasets.

In: Datasets of one step or of many. Out: curve points, intervals, fits and comparisons between models.

- `curves`: curve points of one result
- `regression`: linear, partial and exponential fits, intervals, correction for multiple tests
- `onset`: the steps between which a curve departs from its null level
- `selections`: results, or parts of them, as all analyses take them
- `null_levels`: null levels of the mis-couplings of a Dataset
- `reduction`: units reduced to what the page and summaries show; mis-couplings of a store, read one unit at a time
- `across_models`: fits over several results, one point per result, and clusters of those that are not independent
- `summary`, `doubts`: a table of results, with intervals; what to know before trusting or comparing them
- `variables`: reductions of arrays with named dimensions
"""
