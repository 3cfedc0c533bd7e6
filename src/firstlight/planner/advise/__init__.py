"""Choose a model and the length of its run for a budget. `plan --budget` and `train TEXTS` use this
package."""
