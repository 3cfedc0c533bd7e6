"""Choose a model and a run length that fit a budget. `plan --budget` and `train TEXTS` use this
package."""
