"""From a config to live objects: the model, the batch, the loss, the random state and the device.

``factories`` imports what a config names, ``model`` and ``loss`` build from it, ``batch`` reads batch files and
bundles, ``call`` turns a batch into arguments, ``mismatch`` explains why a batch does not fit, ``rng`` keeps and sets
random state.
"""
