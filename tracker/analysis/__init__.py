"""Statistics of measured Datasets.

In: Datasets of one step or of many. Out: curve points, intervals, fits and comparisons between models.

- `statistics`: curve points and null levels of one result
- `regression`: linear, partial and exponential fits, intervals, correction for multiple tests
- `onset`: the steps between which a curve departs from its null level
- `miscouplings`: mis-couplings of the units of a store, with null levels, read one unit at a time
- `conventions`: which results may share a curve
- `clusters`: which results are not independent
- `across_models`: fits over several results, one point per result
- `jsonable`: conversion to JSON
"""
