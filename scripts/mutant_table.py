"""The known bugs that `mutants.py` puts into the source, and the tests that must notice them."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: of the bug.
        file: in `src`.
        old: text that stands there exactly once.
        new: what it becomes.
        tests: pytest's names of those that fail then.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_STEPS = "tests/faults/test_known_bugs_steps.py::test_"
_DATA = "tests/faults/test_known_bugs_data.py::test_"
_CHECKPOINTS = "tests/faults/test_known_bugs_checkpoints.py::test_"
_CHANGING = "tests/faults/test_changing_folders.py::test_"
_PRUNED = "tests/faults/test_pruned_while_read.py::test_"
_PREFERENCE = "tests/training/test_preference.py::test_"
_TEXT = "tests/faults/test_known_bugs_text.py::test_"
_FAKE_STEPS = "tests/gpu/test_fake_steps.py::test_"
_MINUTES = "tests/training/test_time_budget.py::test_"
_FAKE_RUNS = "tests/gpu/test_fake_runs.py::test_"
_FAKE_TEXT = "tests/gpu/test_fake_generation.py::test_"
_FAKE_FAMILIES = "tests/gpu/test_fake_families.py::test_"
_FAKE_RANKS = "tests/gpu/test_fake_processes.py::test_"
_LATE = "tests/gpu/test_late_copies.py::test_"
_COMPILED = "tests/generation/test_compiled.py::test_"
_MUON = "tests/optim/test_muon.py::test_"
_GROUPS = "tests/optim/test_groups.py::test_"
_SCHEDULE = "tests/optim/test_schedule.py::test_"
_COOLDOWN = "tests/training/test_cooldown.py::test_"
_SAVING = "tests/checkpoint/test_saver.py::test_"
_SAME_BITS = "tests/methods/test_determinism.py::test_"
_ORDER = (
    "tests/faults/test_loader_order.py::"
    "test_any_shards_ranks_workers_and_interruptions_give_the_order_of_one_process"
)

_LOADER = "firstlight/data/loader.py"
_SHARDS = "firstlight/data/shards.py"
_CORPUS = "firstlight/data/corpus.py"
_EXAMPLES = "firstlight/data/packing.py"
_PACKED = "tests/data/test_packed_examples.py::test_"
_LABELS = "tests/tokenizer/test_chat_labels.py::test_"
_LOST = "tests/faults/test_lost_writes.py::test_"
_LOST_DATA = "tests/faults/test_lost_data_writes.py::test_"
_LOST_CHECKPOINTS = _LOST + "a_power_cut_costs_no_checkpoint_that_was_saved"
_ATOMIC = "firstlight/files/atomic.py"

MUTANTS = [
    # Loss and gradients
    Mutant(
        "mean of micro-batch means",
        "firstlight/training/step.py",
        "scaled = loss * engine.loss_factor / (terms / scale)",
        "scaled = loss * engine.loss_factor / (batch.num_valid * len(batches) / scale)",
        (_STEPS + "accumulation_normalised_by_the_means_of_micro_batches",),
    ),
    Mutant(
        "gradient of the last micro-batch alone",
        "firstlight/training/step.py",
        "                scaled = loss * engine.loss_factor",
        "                optimizer.zero_grad()\n                scaled = loss * engine.loss_factor",
        (_STEPS + "only_the_last_micro_batch_has_a_gradient",),
    ),
    Mutant(
        "gradients of the last step kept",
        "firstlight/training/step.py",
        "    optimizer.zero_grad()\n    try:",
        "    try:",
        (_STEPS + "gradients_of_the_step_before_are_added_to_the_next",),
    ),
    Mutant(
        "filled-up tokens count as learned from",
        _LOADER,
        "int((labels != IGNORE_INDEX).sum())",
        "int(labels.size)",
        (_STEPS + "the_partial_last_window_of_an_epoch_weighs_as_much_as_a_whole_one",),
    ),
    Mutant(
        "a norm that is NaN passes",
        "firstlight/training/step.py",
        "finite = abs(result.loss) + abs(result.grad_norm) < math.inf",
        "finite = abs(result.loss) < math.inf",
        (_STEPS + "nan_passes_clipping",),
    ),
    Mutant(
        "NaN passes a comparison",
        "firstlight/training/step.py",
        "finite = abs(result.loss) + abs(result.grad_norm) < math.inf",
        "finite = abs(result.loss) + abs(result.grad_norm) != math.inf",
        (_STEPS + "nan_passes_clipping",),
    ),
    Mutant(
        "clipped before the scale is taken out",
        "firstlight/optim/optimizer.py",
        "norm = (norm if joined is None else joined(norm)) / grad_scale",
        "norm = norm if joined is None else joined(norm)",
        (_STEPS + "clipping_before_the_loss_scale_is_taken_out",),
    ),
    Mutant(
        "tied weight twice in the norm",
        "firstlight/optim/optimizer.py",
        "norm = full_tensor(nn.utils.get_total_norm(gradients))",
        "norm = full_tensor(nn.utils.get_total_norm([*gradients, gradients[0]]))",
        (_STEPS + "a_tied_weight_counts_twice_in_the_gradients_norm",),
    ),
    Mutant(
        "weight decay on norms and biases",
        "firstlight/optim/config.py",
        "vector_weight_decay: float = Field(0.0, ge=0)",
        "vector_weight_decay: float = Field(0.1, ge=0)",
        (_STEPS + "weight_decay_on_norms_and_biases",),
    ),
    Mutant(
        "dropout stays off after an evaluation",
        "firstlight/training/program.py",
        "        if not self.model.training:\n            self.model.train()\n",
        "",
        (_STEPS + "dropout_stays_off_after_an_evaluation",),
    ),
    Mutant(
        "skipped step moves the moments",
        "firstlight/training/step.py",
        "not finite:\n        accepted = False",
        "not finite:\n        accepted = True",
        (_STEPS + "a_step_without_update_moves_the_moments",),
    ),
    # Schedule, optimizer, loss scale
    Mutant(
        "cautious decay away from zero",
        "firstlight/optim/spec.py",
        "decays = direction * parameter >= 0",
        "decays = direction * parameter <= 0",
        (_MUON + "only_numbers_that_move_towards_zero_decay",),
    ),
    Mutant(
        "neurons of the wrong side",
        "firstlight/optim/muon.py",
        "-2 if transposed else -1",
        "-1 if transposed else -2",
        (_MUON + "rows_are_divided_by_their_averaged_size",),
    ),
    Mutant(
        "every role at one rate",
        "firstlight/optim/config.py",
        'self.learning_rate * own.get("lr_multiple", 1.0)',
        "self.learning_rate",
        (_GROUPS + "every_optimizer_takes_a_roles_own_rate",),
    ),
    Mutant(
        "z-loss in evaluations",
        "firstlight/models/ops.py",
        "if z_loss_coef and torch.is_grad_enabled():",
        "if z_loss_coef:",
        (
            "tests/methods/test_single_methods.py::"
            "test_the_z_loss_is_the_squared_logarithm_of_the_softmaxs_divisor",
        ),
    ),
    Mutant(
        "warmup begins at zero",
        "firstlight/optim/schedule.py",
        "return (step + 1) / self.warmup_steps",
        "return step / self.warmup_steps",
        (_STEPS + "the_schedule_is_off_by_one",),
    ),
    Mutant(
        "decay ends a step late",
        "firstlight/optim/schedule.py",
        "min((step - begin + 1) / ",
        "min((step - begin) / ",
        (_STEPS + "the_least_learning_rate_is_never_reached_or_a_step_early",),
    ),
    Mutant(
        "decay ends a step early",
        "firstlight/optim/schedule.py",
        "max(steps - begin, 1), 1.0)",
        "max(steps - begin - 1, 1), 1.0)",
        (_STEPS + "the_least_learning_rate_is_never_reached_or_a_step_early",),
    ),
    Mutant(
        "wsd decays from the end of its warm-up",
        "firstlight/optim/schedule.py",
        "return self.decay_steps - self.cooldown_steps if self.cooldown_steps",
        "return self.warmup_steps if self.cooldown_steps",
        (_SCHEDULE + "wsd_is_stable_at_the_peak_and_comes_down_in_its_last_part",),
    ),
    Mutant(
        "a ramp rises a step early",
        "firstlight/optim/schedule.py",
        "self.start * (1 + rises * step // self.ramp_steps)",
        "self.start * (1 + rises * (step + 1) // self.ramp_steps)",
        (
            _SCHEDULE + "a_step_has_more_rows_in_equal_parts_over_the_ramp",
            _SCHEDULE + "the_position_is_the_sum_of_the_steps_before",
        ),
    ),
    Mutant(
        "the position in a ramp counts each rise a step late",
        "firstlight/optim/schedule.py",
        "begins = (-(-rise * self.ramp_steps // rises)",
        "begins = (rise * self.ramp_steps // rises + 1",
        (_SCHEDULE + "the_position_is_the_sum_of_the_steps_before",),
    ),
    Mutant(
        "a cooldown begins with a warm-up of its own",
        "firstlight/training/cooldown.py",
        '"warmup_steps": schedule.warmup_steps,',
        '"warmup_steps": step + 1,',
        (_COOLDOWN + "a_cooldown_is_bit_for_bit_the_end_of_one_wsd_run",),
    ),
    Mutant(
        "a cooldown of steps counted from the trunk's first",
        "firstlight/training/cooldown.py",
        '"max_steps": step + steps,',
        '"max_steps": max(steps, step + 1),',
        (_COOLDOWN + "a_cooldown_is_bit_for_bit_the_end_of_one_wsd_run",),
    ),
    Mutant(
        "Muon's rate falls with the width as AdamW's does",
        "firstlight/optim/config.py",
        "muon_rate * math.sqrt(ratio)",
        "muon_rate * ratio",
        (_GROUPS + "rates_follow_from_the_width_they_were_tuned_at",),
    ),
    Mutant(
        "the rates of a width are derived again from a resolved recipe",
        "firstlight/optim/config.py",
        'changes: dict[str, Any] = {"tuned_width": hidden_size}',
        "changes: dict[str, Any] = {}",
        (_GROUPS + "a_resolved_recipe_has_the_rates_of_its_width_once",),
    ),
    Mutant(
        "a background thread with OpenMP threads of its own",
        "firstlight/hardware/device.py",
        "        torch.set_num_threads(1)\n",
        "",
        (_SAVING + "the_saving_thread_brings_no_threads_of_its_own",),
    ),
    Mutant(
        "horizon rescaled on resume",
        "firstlight/training/run.py",
        "lr_scale = self.schedule.lr_scale(self.state.step)",
        "done = max(self.saved_step, 0)\n"
        "        import dataclasses\n"
        "        left = self.schedule.decay_steps - done\n"
        "        shorter = dataclasses.replace(self.schedule, decay_steps=left)\n"
        "        lr_scale = shorter.lr_scale(self.state.step)",
        (_STEPS + "the_horizon_is_rescaled_on_resume",),
    ),
    Mutant(
        "stale rate in all groups but the first",
        "firstlight/optim/optimizer.py",
        "zip(optimizer.param_groups, peaks, strict=True)",
        "zip(optimizer.param_groups[:1], peaks)",
        (_STEPS + "a_stale_learning_rate_in_restored_groups",),
    ),
    Mutant(
        "loss scale lost",
        "firstlight/training/state.py",
        'program.scaler.load_state_dict(saved["loss_scale"])',
        "pass",
        (_STEPS + "the_loss_scale_is_lost_on_resume",),
    ),
    # Numbers
    Mutant(
        "embedding counted as a product",
        "firstlight/models/accounting.py",
        "return not isinstance(owner, Embedding) and model.get_parameter(name).dim() >= 2",
        "return model.get_parameter(name).dim() >= 2",
        (_STEPS + "an_mfu_of_more_than_a_hundred_percent",),
    ),
    Mutant(
        "tokens a second by a moment",
        "firstlight/training/run.py",
        " seconds = time.perf_counter() - self._step_began",
        " seconds = time.perf_counter()",
        (_STEPS + "tokens_a_second_are_divided_by_a_moment_and_not_a_time",),
    ),
    # Data that change under a run
    Mutant(
        "blocks of a shard are not compared",
        _SHARDS,
        "known not in (-1, checksum)",
        "known == -2",
        (_CHANGING + "a_shard_that_changes_while_it_is_open_is_never_read_as_another",),
    ),
    Mutant(
        "batches that were read and not used are skipped on resume",
        "firstlight/training/checkpoints.py",
        "rows_seen = run.state.rows_seen\n",
        'rows_seen = run.loader.state_dict()["rows_seen"]\n',
        (
            "tests/faults/test_every_step.py::test_a_run_stopped_at_any_step_ends_as_one_that_was_not",
        ),
    ),
    Mutant(
        "a run follows its path into another's folder",
        "firstlight/checkpoint/run_folder.py",
        "os.path.samestat(os.fstat(self._opened), os.stat(self._path))",
        "self._path.is_dir()",
        (_CHANGING + "a_run_leaves_the_folder_alone_that_takes_the_place_of_its_own",),
    ),
    Mutant(
        "a checkpoint deleted while it is read ends a command",
        "firstlight/checkpoint/selection.py",
        "            if folder.exists():\n                raise\n",
        "            raise\n",
        (_PRUNED + "a_checkpoint_deleted_while_a_command_reads_it_gives_way_to_the_newest",),
    ),
    Mutant(
        "the data of a model are read from a checkpoint that may be gone",
        "firstlight/evaluation/perplexity.py",
        "            return dataclasses.replace(loaded, trained_on=trained_on(folder))\n",
        "            return loaded\n",
        (_PRUNED + "a_model_whose_checkpoint_is_deleted_is_evaluated_as_it_was_trained",),
    ),
    Mutant(
        "references filed under a newer checkpoint than was loaded",
        "firstlight/training/starting_model.py",
        "ModelIdentity(base_name(init_from, folder), base_identity(folder))",
        "ModelIdentity(str(init_from), base_identity(resolve_model_folder(init_from)))",
        (_PREFERENCE + "references_are_those_of_the_checkpoint_that_was_loaded",),
    ),
    # Data: order and position
    Mutant(
        "every epoch in the first's order",
        _CORPUS,
        "shuffled_index(index, rows, seed, epoch)",
        "shuffled_index(index, rows, seed, 0)",
        (_DATA + "the_order_of_an_epoch_is_reset_on_resume",),
    ),
    Mutant(
        "epoch forgotten on resume",
        _LOADER,
        "self.rows_seen = rows_seen\n",
        "self.rows_seen = rows_seen % self.rows_per_epoch\n",
        (_DATA + "the_second_resume_differs",),
    ),
    Mutant(
        "a run at the end of an epoch is over",
        "firstlight/training/run.py",
        "or self.state.step < self.max_steps",
        "or self.state.step < self.max_steps and self.state.rows_seen "
        "!= num_rows(self.dataset.num_tokens, self.seq_len)",
        (_DATA + "a_run_resumed_at_the_end_of_an_epoch_ends_untrained",),
    ),
    Mutant(
        "data before the position is read again",
        _LOADER,
        "        self._read_ahead()\n\n    def __enter__",
        "        self.rows_seen = 0\n"
        "        while self.rows_seen < rows_seen:\n"
        "            self.next_batch()\n"
        "        self._read_ahead()\n\n    def __enter__",
        (_DATA + "a_resume_reads_all_the_data_before_its_position_again",),
    ),
    Mutant(
        "every rank reads the first one's rows",
        _LOADER,
        "first = global_first + self.rank * self.micro_batch_size",
        "first = global_first",
        (_DATA + "the_state_of_all_ranks_but_one_is_dropped",),
    ),
    Mutant(
        "ranks count their own rows only",
        _LOADER,
        "self.rows_seen += self.global_rows",
        "self.rows_seen += self.micro_batch_size",
        (_DATA + "the_state_of_all_ranks_but_one_is_dropped", _ORDER),
    ),
    Mutant(
        "ranks read ahead into each other's rows",
        _LOADER,
        "len(self._ahead) * self.global_rows",
        "len(self._ahead) * self.micro_batch_size",
        (_ORDER,),
    ),
    Mutant(
        "rows that were read ahead count as seen",
        _LOADER,
        'return {"rows_seen": self.rows_seen}',
        'return {"rows_seen": self.rows_seen + len(self._ahead) * self.global_rows}',
        (_DATA + "what_was_read_ahead_is_lost_on_resume", _ORDER),
    ),
    Mutant(
        "the reader that is done first is served first",
        _LOADER,
        "            batch = self._ahead[0].result()\n            self._ahead.popleft()\n",
        "            from concurrent.futures import FIRST_COMPLETED, wait\n"
        "            ready = next(iter(wait(self._ahead, return_when=FIRST_COMPLETED).done))\n"
        "            self._ahead.remove(ready)\n"
        "            batch = ready.result()\n",
        (_DATA + "batches_come_in_the_order_in_which_readers_finish",),
    ),
    # Data: what is learned from
    Mutant(
        "last partial row lost",
        _CORPUS,
        "return -(-max(num_tokens - 1, 0) // seq_len)",
        "return max(num_tokens - 1, 0) // seq_len",
        (_DATA + "the_last_partial_row_of_an_epoch_is_lost", _ORDER),
    ),
    Mutant(
        "a row's last token not predicted",
        _CORPUS,
        "row * seq_len + seq_len + 1)",
        "row * seq_len + seq_len)",
        (_DATA + "a_rows_last_token_is_never_predicted",),
    ),
    Mutant(
        "16 bits for 17",
        _SHARDS,
        'np.dtype("<u2") if vocab_size <= 1 << 16',
        'np.dtype("<u2") if vocab_size <= 1 << 17',
        (_DATA + "ids_above_65535_wrap_around",),
    ),
    Mutant(
        "wrapped shards are read",
        _SHARDS,
        "if shard.itemsize < token_dtype(vocab_size).itemsize:",
        "if False:",
        (_DATA + "shards_whose_ids_have_wrapped_around_are_trained_on",),
    ),
    Mutant(
        "ids that don't fit are prepared",
        "firstlight/data/encoding.py",
        "if len(ids) and int(ids.max()) >= vocab_size:",
        "if False:",
        (_DATA + "a_tokenizer_that_gives_ids_beyond_its_vocabulary_is_prepared_with",),
    ),
    Mutant(
        "ids beyond the vocabulary are read",
        _SHARDS,
        ">= vocab_size:",
        "> vocab_size:",
        (_DATA + "an_id_beyond_the_vocabulary_reaches_the_model",),
    ),
    Mutant(
        "documents may overlap",
        _SHARDS,
        "if not ascending or ",
        "if ",
        (_DATA + "documents_that_overlap_or_lie_outside_are_trained_on",),
    ),
    Mutant(
        "documents may lie outside",
        _SHARDS,
        "if not ascending or (ends[0], ends[-1]) != (0, self.num_tokens):",
        "if not ascending:",
        (_DATA + "documents_that_overlap_or_lie_outside_are_trained_on",),
    ),
    Mutant(
        "end of document dropped",
        "firstlight/data/prepare.py",
        "after = [tokenizer.eos_token_id]",
        "after = [][:0]",
        (_DATA + "the_end_of_document_token_is_dropped",),
    ),
    Mutant(
        "a shard twice",
        _CORPUS,
        "if len(set(names)) != len(names):",
        "if False:",
        (_DATA + "a_shard_that_is_listed_twice_is_seen_twice",),
    ),
    Mutant(
        "prompts are learned",
        _EXAMPLES,
        "labels[position:end][loss_mask[1:]] = tokens[1:][loss_mask[1:]]",
        "labels[position:end] = tokens[1:]",
        (_PACKED + "rows_hold_whole_examples_as_documents_with_their_labels",),
    ),
    Mutant(
        "examples see each other",
        _EXAMPLES,
        "loss_mask[1:]]\n            document_ids[position:end] = number",
        "loss_mask[1:]]\n            document_ids[position:end] = 0",
        (_PACKED + "a_packed_batch_has_the_gradient_of_the_examples_one_by_one",),
    ),
    Mutant(
        "long examples are cut in silence",
        _EXAMPLES,
        'if len(long) and self.long == "refuse":',
        "if False:",
        (_PACKED + "long_examples_are_refused_with_the_longest_ones_place",),
    ),
    Mutant(
        "ends of turns are not learned",
        "firstlight/tokenizer/chat_labels.py",
        "return specials[-1].end()",
        "return specials[-1].start()",
        (_LABELS + "answers_and_their_end_tokens_are_learned_and_nothing_else",),
    ),
    Mutant(
        "tokens of the prompt are learned",
        "firstlight/tokenizer/chat_labels.py",
        "first = bool(own[min(start, len(own) - 1)])",
        "first = bool(own[max(end - 1, 0)])",
        (_LABELS + "a_token_that_begins_in_the_prompt_is_not_learned",),
    ),
    Mutant(
        "validation loss is a mean of means",
        "firstlight/evaluation/perplexity.py",
        "losses.append(RowLoss(part[0], float(loss), batch.num_terms))",
        "losses.append(RowLoss(part[0], float(loss) / batch.num_terms, 1))",
        (_DATA + "the_validation_loss_is_a_mean_of_batch_means",),
    ),
    Mutant(
        "data of another tokenizer",
        "firstlight/training/start.py",
        "if (tokenizer.fingerprint, tokenizer.vocab_size) != (",
        "if False and (tokenizer.fingerprint, tokenizer.vocab_size) != (",
        (_DATA + "data_of_another_tokenizer_is_trained_on",),
    ),
    # Checkpoints
    Mutant(
        "partial folder chosen",
        "firstlight/checkpoint/manifest.py",
        "if step is None or not (folder / MANIFEST_NAME).is_file():",
        "if step is None:",
        (_CHECKPOINTS + "a_partial_folder_is_chosen",),
    ),
    Mutant(
        "damaged checkpoint gone on from",
        "firstlight/checkpoint/checkpoint.py",
        'if sha256_of(path) != entry["sha256"]:',
        "if False:",
        (_CHECKPOINTS + "a_damaged_checkpoint_is_gone_on_from",),
    ),
    Mutant(
        "limit of one deletes all",
        "firstlight/checkpoint/retention.py",
        "if one.folder not in kept:",
        "if one.folder not in kept or config.keep_last == 1:",
        (_CHECKPOINTS + "a_limit_of_one_deletes_the_only_checkpoint",),
    ),
    Mutant(
        "deleted before saved",
        "firstlight/checkpoint/saver.py",
        "            folder = save_checkpoint(",
        "            import shutil\n\n"
        "            shutil.rmtree(self._run_folder / 'checkpoints', ignore_errors=True)\n"
        "            folder = save_checkpoint(",
        (_CHECKPOINTS + "the_old_checkpoint_is_deleted_before_the_new_one_is_there",),
    ),
    Mutant(
        "deleted before verified",
        "firstlight/checkpoint/saver.py",
        "            verify_checkpoint(folder, from_disk=True)\n",
        "",
        (_CHECKPOINTS + "the_old_checkpoint_is_deleted_before_the_new_one_is_there",),
    ),
    Mutant(
        "retention after a rollback by step",
        "firstlight/checkpoint/saver.py",
        "        after = self._parent\n",
        "        after = None\n",
        (_CHECKPOINTS + "after_a_rollback_the_newest_save_is_deleted",),
    ),
    Mutant(
        "dead branches count",
        "firstlight/checkpoint/manifest.py",
        "if one.sequence and not any(two.leaves_behind(one) for two in saved)",
        "if one.sequence",
        (_CHECKPOINTS + "a_damaged_newest_checkpoint_takes_a_good_ones_place",),
    ),
    Mutant(
        "best is worst",
        "firstlight/checkpoint/retention.py",
        "best_first(past)[:keep_best]",
        "best_first(past)[-keep_best:]",
        (_CHECKPOINTS + "the_best_checkpoint_is_deleted_when_it_gets_old",),
    ),
    Mutant(
        "checkpoints of NaN",
        "firstlight/checkpoint/checkpoint.py",
        "    require_finite(step, checkpoint.model)\n"
        "    require_finite(step, checkpoint.optimizer)\n",
        "",
        (_CHECKPOINTS + "checkpoints_of_nan_push_the_good_ones_out",),
    ),
    Mutant(
        "moments of NaN",
        "firstlight/checkpoint/checkpoint.py",
        "    require_finite(step, checkpoint.optimizer)\n",
        "",
        (_CHECKPOINTS + "checkpoints_of_nan_push_the_good_ones_out",),
    ),
    Mutant(
        "asynchronous save of later weights",
        "firstlight/checkpoint/saver.py",
        "buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)",
        "self._buffers[name] = tensor.detach()",
        (_CHECKPOINTS + "an_asynchronous_save_holds_later_values",),
    ),
    Mutant(
        "asynchronous save of a later state",
        "firstlight/checkpoint/saver.py",
        "copy.deepcopy(checkpoint.trainer_state)\n        return",
        "checkpoint.trainer_state\n        return",
        (_CHECKPOINTS + "an_asynchronous_save_holds_later_values",),
    ),
    Mutant(
        "failed save not heard of",
        "firstlight/checkpoint/saver.py",
        "self._writing.result()\n        finally:",
        "self._writing.exception()\n        finally:",
        (_CHECKPOINTS + "a_failed_asynchronous_save_is_never_heard_of",),
    ),
    Mutant(
        "wrong step saved",
        "firstlight/training/checkpoints.py",
        '            "random": rest,\n',
        '            "random": rest,\n            "step": run.state.step + 1,\n',
        (_CHECKPOINTS + "the_wrong_step_is_saved",),
    ),
    Mutant(
        "random numbers not restored",
        "firstlight/training/state.py",
        "    restore_own_states(randoms, program, state.step)\n",
        "",
        (_CHECKPOINTS + "random_numbers_are_restored_at_the_wrong_moment",),
    ),
    Mutant(
        "not all weights are saved",
        "firstlight/parallel/engine.py",
        "StateTensors(tensors_of(model), ",
        'StateTensors({n: t for n, t in tensors_of(model).items() if "norm" not in n}, ',
        (_CHECKPOINTS + "what_is_saved_cannot_be_loaded",),
    ),
    Mutant(
        "missing weights are random",
        "firstlight/weights/loading.py",
        '("lacks", sorted(expected.keys() - given.keys()))',
        '("lacks", [])',
        (_CHECKPOINTS + "weights_that_are_missing_are_random",),
    ),
    Mutant(
        "head of its own dropped",
        "firstlight/weights/loading.py",
        "if head is not None and not head.has_values_of(stored[embedding]):",
        "if False:",
        (_CHECKPOINTS + "a_head_of_its_own_is_dropped_for_a_tied_one",),
    ),
    Mutant(
        "lines of metrics twice",
        "firstlight/run_log/writer.py",
        'if record["step"] <= step]',
        "]",
        (_CHECKPOINTS + "lines_of_metrics_stand_twice_after_a_resume",),
    ),
    Mutant(
        "mapped file overwritten",
        "firstlight/weights/stored.py",
        "if now.identity == self.identity and now.state != self.state:",
        "if False:",
        (_TEXT + "a_mapped_file_that_is_overwritten_becomes_zeros",),
    ),
    # Tokens, chats, sampling
    Mutant(
        "added tokens fill gaps",
        "firstlight/tokenizer/parts.py",
        "if any(extended.token_to_id(t) != i for i, t in enumerate(tokens, start=first_id)):",
        "if False:",
        (_TEXT + "added_tokens_get_ids_that_others_have",),
    ),
    Mutant(
        "tied head untied",
        "firstlight/weights/loading.py",
        '"vocab_size": vocab_size})\n    model.finish_loading()\n',
        '"vocab_size": vocab_size})\n',
        (_TEXT + "added_tokens_untie_a_tied_head",),
    ),
    Mutant(
        "beginning of text twice",
        "firstlight/tokenizer/tokenizer.py",
        "        return [token_id for some in ids for token_id in some]\n",
        "        return [self.separator_id, *(token_id for some in ids for token_id in some)]\n",
        (_TEXT + "the_beginning_of_text_stands_twice",),
    ),
    Mutant(
        "messages write control tokens",
        "firstlight/tokenizer/chat_template.py",
        'return special.sub(lambda match: f"{before}{match[0]}{after}", value)',
        "return value",
        (_TEXT + "a_message_can_write_control_tokens",),
    ),
    Mutant(
        "texts write control tokens",
        "firstlight/tokenizer/tokenizer.py",
        "backend.encode_special_tokens = True",
        "backend.encode_special_tokens = False",
        (_TEXT + "a_message_can_write_control_tokens",),
    ),
    Mutant(
        "half a character is streamed",
        "firstlight/tokenizer/tokenizer.py",
        '        if text.endswith("\\ufffd"):\n            return ""\n',
        "",
        (_TEXT + "a_character_of_several_tokens_is_streamed_in_halves",),
    ),
    Mutant(
        "padded id is sampled",
        "firstlight/models/language_model.py",
        "return soft_capped(self.lm_head(x_BTC)[..., :vocab_size], softcap)",
        "return soft_capped(self.lm_head(x_BTC), softcap)",
        (_TEXT + "an_id_that_pads_the_vocabulary_is_sampled",),
    ),
    Mutant(
        "temperature 0 is 0.8",
        "firstlight/generation/engine.py",
        '"logit_bias": logit_bias or {}}',
        '"logit_bias": logit_bias or {}, "temperature": temperature or 0.8}',
        (_TEXT + "temperature_zero_becomes_another",),
    ),
    Mutant(
        "unbounded number of tokens",
        "firstlight/generation/batch.py",
        "self.max_tokens = min(max_tokens, model.config.max_position_embeddings)",
        "self.max_tokens = max_tokens",
        (_TEXT + "a_number_of_tokens_decides_how_much_memory_is_taken",),
    ),
    Mutant(
        "samples draw from the run's generator",
        "firstlight/generation/sampling.py",
        "torch.rand((), dtype=torch.float64, generator=generator)",
        "torch.rand((), dtype=torch.float64)",
        (_TEXT + "samples_drawn_while_training_change_what_is_learned",),
    ),
    # What is opened
    Mutant(
        "pickles run",
        "firstlight/conversion/pickled.py",
        'torch.load(path, map_location="cpu", weights_only=True',
        'torch.load(path, map_location="cpu", weights_only=False',
        (_TEXT + "a_pickle_runs_code_though_only_weights_were_asked_for",),
    ),
    Mutant(
        "templates run",
        "firstlight/tokenizer/chat_template.py",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "from jinja2 import Environment as ImmutableSandboxedEnvironment",
        (_TEXT + "a_chat_template_runs_code",),
    ),
    Mutant(
        "unknown keys ignored",
        "firstlight/section.py",
        'extra="forbid"',
        'extra="ignore"',
        (_TEXT + "an_unknown_key_of_a_recipe_is_ignored",),
    ),
    # CUDA: what runs where, in what, and what is waited for
    Mutant(
        "labels stay on the host",
        _LOADER,
        "            change(self.labels),\n",
        "            self.labels,\n",
        (_FAKE_STEPS + "a_step_runs_on_the_gpu_in_its_precision",),
    ),
    Mutant(
        "numbers of documents stay on the host",
        _LOADER,
        "None if self.document_ids is None else change(self.document_ids)",
        "self.document_ids",
        (_FAKE_STEPS + "documents_are_masked_by_what_takes_masks",),
    ),
    Mutant(
        "references of pairs stay on the host",
        _LOADER,
        "None if self.references is None else change(self.references)",
        "self.references",
        (_FAKE_STEPS + "preference_pairs_stay_on_the_gpu",),
    ),
    Mutant(
        "evaluation on the host's batch",
        "firstlight/evaluation/perplexity.py",
        "moved = batch.to(device)",
        "moved = batch",
        (_FAKE_RUNS + "an_evaluation_runs_on_the_gpu",),
    ),
    Mutant(
        "answers of pairs are counted on the host",
        "firstlight/training/preference.py",
        "numbers_D1 = torch.arange(documents, device=labels_BT.device)[:, None]",
        "numbers_D1 = torch.arange(documents)[:, None]",
        (_FAKE_STEPS + "preference_pairs_stay_on_the_gpu",),
    ),
    Mutant(
        "causal mask on the host",
        "firstlight/models/ops.py",
        "torch.ones(new, total, dtype=torch.bool, device=device)",
        "torch.ones(new, total, dtype=torch.bool)",
        (_FAKE_STEPS + "each_way_to_attend_takes_its_kernel",),
    ),
    Mutant(
        "positions in documents on the host",
        "firstlight/models/ops.py",
        "torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)",
        "torch.arange(document_ids_BT.shape[1])",
        (_FAKE_STEPS + "documents_are_masked_by_what_takes_masks",),
    ),
    Mutant(
        "autocast of the CPU on a GPU",
        "firstlight/methods/precision.py",
        "return torch.autocast(device.type, dtype=dtype, cache_enabled=False)",
        'return torch.autocast("cpu", dtype=dtype, cache_enabled=False)',
        (_FAKE_STEPS + "a_step_runs_on_the_gpu_in_its_precision",),
    ),
    Mutant(
        "norms of DoRA in half precision",
        "firstlight/lora/layers.py",
        "torch.autocast(self.lora_A.device.type, enabled=False)",
        'torch.autocast("cpu", enabled=False)',
        (_FAKE_STEPS + "the_norms_of_dora_are_fp32_under_autocast",),
    ),
    Mutant(
        "documents by a kernel that takes no mask",
        "firstlight/methods/attention.py",
        'return "flex" if not dropout and compiles else "sdpa"',
        'return "flash"',
        (_FAKE_STEPS + "documents_are_masked_by_what_takes_masks",),
    ),
    Mutant(
        "cuDNN's attention for texts that grow",
        "firstlight/methods/attention.py",
        "cuda.enable_cudnn_sdp(False)",
        "cuda.enable_cudnn_sdp(True)",
        (
            "tests/gpu/test_fake_generation.py::"
            "test_texts_that_join_and_leave_a_batch_stay_on_the_gpu",
        ),
    ),
    Mutant(
        "scores of grouped queries in memory",
        "firstlight/models/ops.py",
        "if not _takes_groups(q_BHTD, options):",
        "if False:",
        ("tests/gpu/test_fake_families.py::test_no_scores_of_grouped_queries_are_kept",),
    ),
    Mutant(
        "one kernel of attention for another",
        "firstlight/methods/attention.py",
        '"efficient": SDPBackend.EFFICIENT_ATTENTION',
        '"efficient": SDPBackend.FLASH_ATTENTION',
        (_FAKE_STEPS + "each_way_to_attend_takes_its_kernel",),
    ),
    Mutant(
        "grouped products in dtypes that CUDA has not",
        "firstlight/models/moe.py",
        "return aligned and modern and dtype == torch.bfloat16",
        "return aligned and modern",
        (_FAKE_STEPS + "grouped_products_are_taken_where_cuda_has_them",),
    ),
    Mutant(
        "a wait for the GPU in each micro-batch",
        "firstlight/training/step.py",
        "else total + loss.detach()",
        "else total + float(loss)",
        (_FAKE_STEPS + "a_step_waits_once_for_loss_and_norm_after_its_update",),
    ),
    Mutant(
        "loss of one micro-batch in a graph's memory",
        "firstlight/training/step.py",
        "total = loss.detach().clone() if",
        "total = loss.detach() if",
        (_FAKE_RUNS + "a_loss_in_memory_that_a_cuda_graph_writes_again_is_added_up",),
    ),
    Mutant(
        "fused counters of steps on the host",
        "firstlight/optim/spec.py",
        '"cpu" if key == "step" and not fused else parameter.device',
        '"cpu" if key == "step" else parameter.device',
        (_FAKE_STEPS + "moments_are_put_back_where_they_were",),
    ),
    Mutant(
        "master weights on the host",
        "firstlight/optim/optimizer.py",
        "return given.detach().to(parameter.device)",
        "return given.detach().cpu()",
        (_FAKE_STEPS + "a_step_runs_on_the_gpu_in_its_precision",),
    ),
    Mutant(
        "unused memory never given back",
        "firstlight/training/program.py",
        "if every and self._steps % every == 0 and",
        "if every and self._steps % every == 1 and",
        (_FAKE_STEPS + "unused_memory_is_given_back_every_so_many_steps",),
    ),
    Mutant(
        "a resumed run decides its number of steps anew",
        "firstlight/training/time_budget.py",
        '(record.get("max_minutes"), record.get("most_steps")) == (minutes, most)',
        '(record.get("max_minutes"), record.get("most_steps")) == (-minutes, most)',
        (_MINUTES + "a_killed_run_is_the_whole_run_with_its_decision",),
    ),
    Mutant(
        "minutes end a run that its steps end earlier",
        "firstlight/training/time_budget.py",
        "        steps_left = min(steps_left, most_left)\n",
        "",
        (_MINUTES + "a_run_ends_at_the_first_of_two_limits",),
    ),
    Mutant(
        "the number of steps is not on the disk when the rate falls",
        "firstlight/training/run.py",
        "        wait_for_main(self.engine, self.write_budget)\n",
        "        pass\n",
        (_MINUTES + "a_killed_run_is_the_whole_run_with_its_decision",),
    ),
    Mutant(
        "a corrected decay falls anew from the peak",
        "firstlight/optim/schedule.py",
        "                done += (1 - done) * (at - begin) / (steps - begin)\n",
        "",
        (_MINUTES + "a_corrected_decay_falls_from_the_rate_that_it_has_reached",),
    ),
    Mutant(
        "a resumed run corrects its number of steps",
        "firstlight/training/time_budget.py",
        "isinstance(self.length, DecidedLength) or step == self._next_check_step",
        "isinstance(self.length, DecidedLength) or step % 5 == 0",
        (_MINUTES + "a_resumed_run_keeps_a_corrected_number",),
    ),
    Mutant(
        "time before a kill is free",
        "firstlight/training/time_budget.py",
        '    return {**record, "seconds_used": max(used) or steps_took}\n',
        '    return {**record, "seconds_used": 0.0}\n',
        (_MINUTES + "time_that_was_used_before_a_kill_counts",),
    ),
    Mutant(
        "full memory kept when it ran out",
        "firstlight/training/out_of_memory.py",
        '    gc.collect()\n    if run.program.hardware.device.type == "cuda":\n'
        "        torch.cuda.empty_cache()\n",
        "    gc.collect()\n",
        (_FAKE_RUNS + "memory_that_ran_out_is_given_back_before_the_next_try",),
    ),
    Mutant(
        "asynchronous save not waited for",
        "firstlight/checkpoint/saver.py",
        "            torch.cuda.synchronize(device)\n",
        "            pass\n",
        (_LATE + "a_snapshot_is_whole_when_it_is_given",),
    ),
    Mutant(
        "asynchronous save waits for another GPU",
        "firstlight/checkpoint/saver.py",
        "            torch.cuda.synchronize(device)\n",
        "            torch.cuda.synchronize()\n",
        (_LATE + "a_snapshot_is_whole_when_it_is_given",),
    ),
    Mutant(
        "save through memory that may be moved",
        "firstlight/checkpoint/saver.py",
        "pin_memory=tensor.is_cuda",
        "pin_memory=False",
        (_LATE + "a_snapshot_is_whole_when_it_is_given",),
    ),
    Mutant(
        "page-locked memory written again too early",
        "firstlight/checkpoint/saver.py",
        "        self.wait()\n        checkpoint = capture()\n        if",
        "        checkpoint = capture()\n        if",
        (_LATE + "a_checkpoint_holds_the_moment_of_its_save_while_training_goes_on",),
    ),
    Mutant(
        "a wait for each tensor of a save",
        "firstlight/parallel/engine.py",
        "StateTensors(tensors_of(model), ",
        "StateTensors(on_cpu(tensors_of(model)), ",
        (_LATE + "a_run_stands_still_for_one_copy_of_its_state",),
    ),
    Mutant(
        "activations used before they are copied back",
        "firstlight/methods/memory.py",
        "        torch.cuda.current_stream(self._device).wait_event(event)\n        self._drop",
        "        self._drop",
        (_LATE + "activations_are_copied_beside_the_computation_and_there_when_it_needs_them",),
    ),
    Mutant(
        "a wait for each activation",
        "firstlight/methods/memory.py",
        'device="cpu", pin_memory=True',
        'device="cpu"',
        (_LATE + "what_the_forward_pass_keeps_is_page_locked_and_comes_back",),
    ),
    Mutant(
        "activations do not come back",
        "firstlight/methods/memory.py",
        "return _copies(packed.device).bring_back(packed)",
        "return packed.kept",
        (_LATE + "what_the_forward_pass_keeps_is_page_locked_and_comes_back",),
    ),
    Mutant(
        "batches in memory that may be moved",
        _LOADER,
        "return batch.pin_memory() if self.pin_memory else batch",
        "return batch",
        (_LATE + "batches_come_from_page_locked_memory_without_a_wait",),
    ),
    Mutant(
        "a wait for each batch",
        _LOADER,
        "tensor.to(device, non_blocking=True)",
        "tensor.to(device)",
        (_LATE + "batches_come_from_page_locked_memory_without_a_wait",),
    ),
    Mutant(
        "keys and values on the host",
        "firstlight/models/cache.py",
        "torch.zeros(batch_size, K, max_tokens, size, dtype=dtype, device=device)",
        "torch.zeros(batch_size, K, max_tokens, size, dtype=dtype)",
        (_FAKE_TEXT + "texts_that_join_and_leave_a_batch_stay_on_the_gpu",),
    ),
    Mutant(
        "states of linear attention on the host",
        "firstlight/models/cache.py",
        "torch.zeros(batch_size, *shape, dtype=wide, device=device)",
        "torch.zeros(batch_size, *shape, dtype=wide)",
        (_FAKE_FAMILIES + "texts_of_each_family_stay_on_the_gpu",),
    ),
    Mutant(
        "mask of linear attention on the host",
        "firstlight/models/qwen3_next.py",
        "torch.ones(size, size, dtype=torch.bool, device=q.device).tril()",
        "torch.ones(size, size, dtype=torch.bool).tril()",
        (_FAKE_FAMILIES + "texts_of_each_family_stay_on_the_gpu",),
    ),
    Mutant(
        "numbers of experts with biases on the host",
        "firstlight/models/gpt_oss.py",
        "torch.arange(len(self.down_proj), device=x_MC.device)",
        "torch.arange(len(self.down_proj))",
        (_FAKE_FAMILIES + "texts_of_each_family_stay_on_the_gpu",),
    ),
    Mutant(
        "numbers of experts on the host",
        "firstlight/models/moe.py",
        "torch.arange(num_experts, device=experts_NK.device)",
        "torch.arange(num_experts)",
        (_FAKE_STEPS + "a_step_runs_on_the_gpu_in_its_precision",),
    ),
    Mutant(
        "lengths of texts on the host",
        "firstlight/generation/batch.py",
        "torch.zeros(max_sequences, dtype=torch.int64, device=device) for _ in range(2)",
        "torch.zeros(max_sequences, dtype=torch.int64) for _ in range(2)",
        (_FAKE_TEXT + "texts_that_join_and_leave_a_batch_stay_on_the_gpu",),
    ),
    Mutant(
        "weights of 8 bits on a GPU",
        "firstlight/generation/engine.py",
        'if dtype == "int8" and torch.device(device).type == "cuda":',
        "if False:",
        ("tests/generation/test_int8.py::test_int8_on_a_gpu_is_refused",),
    ),
    Mutant(
        "weights become constants on a GPU",
        "firstlight/generation/batch.py",
        'freezing=device.type == "cpu"',
        "freezing=True",
        (_FAKE_TEXT + "a_compiled_step_of_a_gpu_keeps_weights_as_arguments",),
    ),
    Mutant(
        "graph recorded before anything is compiled",
        "firstlight/generation/batch.py",
        "                self._by_shape.popitem(last=False)\n"
        "            return super()._run(rows, reach)\n",
        "                self._by_shape.popitem(last=False)\n",
        (_COMPILED + "a_shape_of_steps_is_recorded_when_it_comes_again",),
    ),
    Mutant(
        "recorded step of the tokens before",
        "firstlight/generation/batch.py",
        "            self._ids_B[: len(ids_B)] = ids_B\n",
        "",
        (_COMPILED + "tokens_and_lengths_stay_on_the_device_while_the_sequences_are_the_same",),
    ),
    Mutant(
        "logits that the next recorded step overwrites",
        "firstlight/generation/batch.py",
        "return logits_BV.clone()",
        "return logits_BV",
        (_COMPILED + "a_shape_of_steps_is_recorded_when_it_comes_again",),
    ),
    Mutant(
        "steps on a GPU in no fixed order",
        "firstlight/methods/compilation.py",
        '(kind == "cuda" and deterministic)',
        "False",
        (_SAME_BITS + "on_a_gpu_the_algorithms_are_deterministic_where_that_is_asked_for",),
    ),
    Mutant(
        "weights read into the host's memory",
        "firstlight/weights/loading.py",
        "    allocate(model, device)\n    places = ",
        '    allocate(model, torch.device("cpu"))\n    places = ',
        (_FAKE_TEXT + "weights_go_to_the_gpu_part_by_part",),
    ),
    Mutant(
        "first GPU for every process",
        "firstlight/parallel/group.py",
        "index = 0 if count == 1 else world.local_rank",
        "index = 0",
        (_FAKE_RANKS + "each_process_takes_the_gpu_of_its_place_on_the_machine",),
    ),
    Mutant(
        "GPU of the rank in the whole world",
        "firstlight/parallel/group.py",
        "index = 0 if count == 1 else world.local_rank",
        "index = 0 if count == 1 else world.rank",
        (_FAKE_RANKS + "each_process_takes_the_gpu_of_its_place_on_the_machine",),
    ),
    Mutant(
        "current GPU not set",
        "firstlight/training/processes.py",
        "        torch.cuda.set_device(device)\n",
        "        pass\n",
        (_FAKE_RANKS + "each_process_takes_the_gpu_of_its_place_on_the_machine",),
    ),
    Mutant(
        "gradients of GPUs by the CPU's library",
        "firstlight/parallel/group.py",
        '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",',
        '"gloo",',
        (_FAKE_RANKS + "each_process_takes_the_gpu_of_its_place_on_the_machine",),
    ),
    Mutant(
        "NCCL guesses the GPU",
        "firstlight/parallel/group.py",
        'device_id=device if device.type == "cuda" else None',
        "device_id=None",
        (_FAKE_RANKS + "each_process_takes_the_gpu_of_its_place_on_the_machine",),
    ),
    Mutant(
        "shards of fsdp sent by the CPU",
        "firstlight/parallel/sharding.py",
        "self.device.type, tuple(sizes.values())",
        '"cpu", tuple(sizes.values())',
        (_FAKE_RANKS + "fsdp_shares_gpus_over_nccl",),
    ),
    Mutant(
        "clock stopped before the GPU has finished",
        "firstlight/hardware/device.py",
        "torch.cuda.synchronize(device)",
        "torch.cuda.synchronize()",
        (_FAKE_RANKS + "memory_and_time_are_those_of_the_device_asked_for",),
    ),
    Mutant(
        "random numbers of the first GPU alone",
        "firstlight/training/state.py",
        "enumerate(torch.cuda.get_rng_state_all())",
        "enumerate([torch.cuda.get_rng_state()])",
        (_FAKE_RANKS + "random_numbers_of_every_gpu_are_saved_and_put_back",),
    ),
    Mutant(
        "random numbers put into another GPU",
        "firstlight/training/state.py",
        "torch.cuda.set_rng_state(tensor, int(index[0]))",
        "torch.cuda.set_rng_state(tensor)",
        (_FAKE_RANKS + "random_numbers_of_every_gpu_are_saved_and_put_back",),
    ),
    # Power cuts
    Mutant(
        "files have their names before they are on the disk",
        "firstlight/files/disk.py",
        "                disk.sync(self._file)\n",
        "",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "name of a checkpoint not synced",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n\n\n@contextlib.contextmanager\ndef _locked",
        "\n\n@contextlib.contextmanager\ndef _locked",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "entries of a checkpoint not synced",
        _ATOMIC,
        "                _sync_tree(temporary, files=not synced)\n",
        "",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "name of a run folder not synced",
        "firstlight/checkpoint/run_folder.py",
        "            make_folder(folder)\n",
        "            folder.mkdir(parents=True, exist_ok=True)\n",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "old checkpoint emptied before its name is gone",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n    _remove(aside)\n",
        "    _remove(aside)\n",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "old shards deleted before the new ones have their name",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n        _remove(old)\n",
        "        _remove(old)\n",
        (_LOST_DATA + "prepared_shards_are_whole_or_refused_after_a_power_cut",),
    ),
    Mutant(
        "name of a replaced file not synced",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n\n\ndef write_file",
        "\n\ndef write_file",
        (_LOST_DATA + "measured_gpus_are_whole_or_measured_again_after_a_power_cut",),
    ),
    Mutant(
        "logs not synced before a checkpoint",
        "firstlight/run_log/writer.py",
        "        self._metrics.sync()\n",
        "",
        (_LOST + "log_lines_that_were_synced_outlive_a_power_cut",),
    ),
    Mutant(
        "name of a new log not synced",
        "firstlight/files/disk.py",
        "                disk.sync_folder(path.parent)\n",
        "",
        (_LOST + "log_lines_that_were_synced_outlive_a_power_cut",),
    ),
    Mutant(
        "damaged log gone before the new one is there",
        _ATOMIC,
        "            seam.disk.link(path, aside)\n",
        "            seam.disk.rename(path, aside)\n",
        (_LOST + "a_second_power_cut_while_damaged_logs_are_put_right_costs_no_line",),
    ),
    Mutant(
        "compiled kernel not synced",
        "firstlight/generation/few_rows.py",
        "            write_file(library, built.read_bytes())\n",
        "            built.replace(library)\n",
        (_LOST_DATA + "a_compiled_kernel_is_whole_or_compiled_again_after_a_power_cut",),
    ),
]
