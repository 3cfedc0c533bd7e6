"""The known bugs that `mutants.py` inserts into the source, and the tests that must detect them."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: name of the bug.
        file: path in `src`.
        old: text that occurs exactly once in the file.
        new: its replacement.
        tests: pytest names of the tests that then fail.
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
    "test_loader_any_shards_ranks_workers_and_resumes_keep_one_order"
)

_LOADER = "firstlight/data/loader.py"
_SHARDS = "firstlight/data/shards.py"
_CORPUS = "firstlight/data/corpus.py"
_EXAMPLES = "firstlight/data/packing.py"
_PACKED = "tests/data/test_packed_examples.py::test_"
_LABELS = "tests/tokenizer/test_chat_labels.py::test_"
_LOST = "tests/faults/test_lost_writes.py::test_"
_LOST_DATA = "tests/faults/test_lost_data_writes.py::test_"
_LOST_CHECKPOINTS = _LOST + "power_cut_loses_no_saved_checkpoint"
_ATOMIC = "firstlight/files/atomic.py"

MUTANTS = [
    # Loss and gradients
    Mutant(
        "mean of the micro-batches' means",
        "firstlight/training/step.py",
        "scaled = loss * engine.loss_factor / (terms / scale)",
        "scaled = loss * engine.loss_factor / (batch.num_valid * len(batches) / scale)",
        (_STEPS + "accumulation_is_normalised_by_tokens_not_micro_batches",),
    ),
    Mutant(
        "gradient of only the last micro-batch",
        "firstlight/training/step.py",
        "                scaled = loss * engine.loss_factor",
        "                optimizer.zero_grad()\n                scaled = loss * engine.loss_factor",
        (_STEPS + "accumulation_includes_gradient_of_every_micro_batch",),
    ),
    Mutant(
        "gradients of the previous step kept",
        "firstlight/training/step.py",
        "    optimizer.zero_grad()\n    try:",
        "    try:",
        (_STEPS + "gradients_of_previous_step_are_cleared",),
    ),
    Mutant(
        "padding tokens count as learned",
        _LOADER,
        "int((labels != IGNORE_INDEX).sum())",
        "int(labels.size)",
        (_STEPS + "accumulation_partial_last_window_is_weighted_by_tokens",),
    ),
    Mutant(
        "NaN norm accepted",
        "firstlight/training/step.py",
        "finite = abs(result.loss) + abs(result.grad_norm) < math.inf",
        "finite = abs(result.loss) < math.inf",
        (_STEPS + "clipping_nan_gradient_raises_and_changes_nothing",),
    ),
    Mutant(
        "NaN passes a comparison",
        "firstlight/training/step.py",
        "finite = abs(result.loss) + abs(result.grad_norm) < math.inf",
        "finite = abs(result.loss) + abs(result.grad_norm) != math.inf",
        (_STEPS + "clipping_nan_gradient_raises_and_changes_nothing",),
    ),
    Mutant(
        "clipped before the loss scale is removed",
        "firstlight/optim/optimizer.py",
        "norm = (norm if joined is None else joined(norm)) / grad_scale",
        "norm = norm if joined is None else joined(norm)",
        (_STEPS + "clipping_applies_after_unscaling_loss",),
    ),
    Mutant(
        "tied weight counted twice in the norm",
        "firstlight/optim/optimizer.py",
        "norm = full_tensor(nn.utils.get_total_norm(gradients))",
        "norm = full_tensor(nn.utils.get_total_norm([*gradients, gradients[0]]))",
        (_STEPS + "grad_norm_counts_tied_weight_once",),
    ),
    Mutant(
        "weight decay on norms and biases",
        "firstlight/optim/config.py",
        "vector_weight_decay: float = Field(0.0, ge=0)",
        "vector_weight_decay: float = Field(0.1, ge=0)",
        (_STEPS + "weight_decay_excludes_norms_and_biases",),
    ),
    Mutant(
        "dropout stays off after an evaluation",
        "firstlight/training/program.py",
        "        if not self.model.training:\n            self.model.train()\n",
        "",
        (_STEPS + "dropout_is_reenabled_after_evaluation",),
    ),
    Mutant(
        "skipped step changes the moments",
        "firstlight/training/step.py",
        "not finite:\n        accepted = False",
        "not finite:\n        accepted = True",
        (_STEPS + "skipped_step_leaves_moments_unchanged",),
    ),
    # Schedule, optimizer, loss scale
    Mutant(
        "cautious decay in the wrong direction",
        "firstlight/optim/spec.py",
        "decays = direction * parameter >= 0",
        "decays = direction * parameter <= 0",
        (_MUON + "cautious_weight_decay_applies_only_to_values_moving_towards_zero",),
    ),
    Mutant(
        "neurons along the wrong axis",
        "firstlight/optim/muon.py",
        "-2 if transposed else -1",
        "-1 if transposed else -2",
        (_MUON + "normuon_divides_rows_by_averaged_size",),
    ),
    Mutant(
        "same learning rate for every role",
        "firstlight/optim/config.py",
        'self.learning_rate * own.get("lr_multiple", 1.0)',
        "self.learning_rate",
        (_GROUPS + "parameter_groups_every_optimizer_applies_own_learning_rate_of_role",),
    ),
    Mutant(
        "z-loss added in evaluations",
        "firstlight/models/ops.py",
        "if z_loss_coef and torch.is_grad_enabled():",
        "if z_loss_coef:",
        (
            "tests/methods/test_single_methods.py::"
            "test_z_loss_matches_squared_log_partition_function",
        ),
    ),
    Mutant(
        "warm-up starts at zero",
        "firstlight/optim/schedule.py",
        "return (step + 1) / self.warmup_steps",
        "return step / self.warmup_steps",
        (_STEPS + "schedule_warmup_and_decay_start_at_expected_step",),
    ),
    Mutant(
        "decay ends a step late",
        "firstlight/optim/schedule.py",
        "min((step - begin + 1) / ",
        "min((step - begin) / ",
        (_STEPS + "schedule_minimum_learning_rate_is_reached_at_last_step",),
    ),
    Mutant(
        "decay ends a step early",
        "firstlight/optim/schedule.py",
        "max(steps - begin, 1), 1.0)",
        "max(steps - begin - 1, 1), 1.0)",
        (_STEPS + "schedule_minimum_learning_rate_is_reached_at_last_step",),
    ),
    Mutant(
        "wsd decays from the end of its warm-up",
        "firstlight/optim/schedule.py",
        "return self.decay_steps - self.cooldown_steps if self.cooldown_steps",
        "return self.warmup_steps if self.cooldown_steps",
        (_SCHEDULE + "wsd_schedule_stays_at_peak_and_decays_at_end",),
    ),
    Mutant(
        "ramp increases a step early",
        "firstlight/optim/schedule.py",
        "self.start * (1 + rises * step // self.ramp_steps)",
        "self.start * (1 + rises * (step + 1) // self.ramp_steps)",
        (
            _SCHEDULE + "batch_ramp_increases_rows_in_equal_stages",
            _SCHEDULE + "batch_ramp_position_is_sum_of_earlier_steps",
        ),
    ),
    Mutant(
        "position in a ramp counts each increase a step late",
        "firstlight/optim/schedule.py",
        "begins = (-(-rise * self.ramp_steps // rises)",
        "begins = (rise * self.ramp_steps // rises + 1",
        (_SCHEDULE + "batch_ramp_position_is_sum_of_earlier_steps",),
    ),
    Mutant(
        "cooldown starts with its own warm-up",
        "firstlight/training/cooldown.py",
        '"warmup_steps": schedule.warmup_steps,',
        '"warmup_steps": step + 1,',
        (_COOLDOWN + "cooldown_is_bitwise_equal_to_end_of_wsd_run",),
    ),
    Mutant(
        "cooldown steps counted from the trunk's first step",
        "firstlight/training/cooldown.py",
        '"max_steps": step + steps,',
        '"max_steps": max(steps, step + 1),',
        (_COOLDOWN + "cooldown_is_bitwise_equal_to_end_of_wsd_run",),
    ),
    Mutant(
        "Muon's learning rate scales with the width like AdamW's",
        "firstlight/optim/config.py",
        "muon_rate * math.sqrt(ratio)",
        "muon_rate * ratio",
        (_GROUPS + "learning_rates_scale_from_tuned_width",),
    ),
    Mutant(
        "width-scaled learning rates scaled again in a resolved recipe",
        "firstlight/optim/config.py",
        'changes: dict[str, Any] = {"tuned_width": hidden_size}',
        "changes: dict[str, Any] = {}",
        (_GROUPS + "resolved_recipe_scales_rates_with_width_once",),
    ),
    Mutant(
        "background thread gets its own OpenMP threads",
        "firstlight/hardware/device.py",
        "        torch.set_num_threads(1)\n",
        "",
        (_SAVING + "saving_thread_starts_no_extra_openmp_threads",),
    ),
    Mutant(
        "schedule rescaled on resume",
        "firstlight/training/run.py",
        "lr_scale = self.schedule.lr_scale(self.state.step)",
        "done = max(self.saved_step, 0)\n"
        "        import dataclasses\n"
        "        left = self.schedule.decay_steps - done\n"
        "        shorter = dataclasses.replace(self.schedule, decay_steps=left)\n"
        "        lr_scale = shorter.lr_scale(self.state.step)",
        (_STEPS + "schedule_horizon_is_unchanged_on_resume",),
    ),
    Mutant(
        "old learning rate in all groups but the first",
        "firstlight/optim/optimizer.py",
        "zip(optimizer.param_groups, peaks, strict=True)",
        "zip(optimizer.param_groups[:1], peaks)",
        (_STEPS + "restored_optimizer_uses_learning_rate_of_schedule",),
    ),
    Mutant(
        "loss scale lost on resume",
        "firstlight/training/state.py",
        'program.scaler.load_state_dict(saved["loss_scale"])',
        "pass",
        (_STEPS + "loss_scale_is_restored_on_resume",),
    ),
    # Numbers
    Mutant(
        "embedding counted as a matrix product",
        "firstlight/models/accounting.py",
        "return not isinstance(owner, Embedding) and model.get_parameter(name).dim() >= 2",
        "return model.get_parameter(name).dim() >= 2",
        (_STEPS + "mfu_excludes_embedding_lookup",),
    ),
    Mutant(
        "tokens per second from a single moment",
        "firstlight/training/run.py",
        " seconds = now - max(self._read.began, self._step_ended)",
        " seconds = now",
        (_STEPS + "tokens_per_second_divides_by_step_duration",),
    ),
    # Data that changes during a run
    Mutant(
        "blocks of a shard not compared",
        _SHARDS,
        "known not in (-1, checksum)",
        "known == -2",
        (_CHANGING + "shard_modified_while_open_is_never_read_as_other_data",),
    ),
    Mutant(
        "prefetched but unused batches skipped on resume",
        "firstlight/training/checkpoints.py",
        "rows_seen = run.state.rows_seen\n",
        'rows_seen = run.loader.state_dict()["rows_seen"]\n',
        (
            "tests/faults/test_every_step.py::test_run_stopped_at_any_step_ends_like_uninterrupted_run",
        ),
    ),
    Mutant(
        "run follows its path into another run's folder",
        "firstlight/checkpoint/run_folder.py",
        "os.path.samestat(os.fstat(self._opened), os.stat(self._path))",
        "self._path.is_dir()",
        (_CHANGING + "run_with_replaced_folder_leaves_new_folder_unchanged",),
    ),
    Mutant(
        "checkpoint deleted during reading ends a command",
        "firstlight/checkpoint/selection.py",
        "            if folder.exists():\n                raise\n",
        "            raise\n",
        (_PRUNED + "load_checkpoint_deleted_during_read_falls_back_to_newest",),
    ),
    Mutant(
        "data of a model read from a checkpoint that may be deleted",
        "firstlight/evaluation/perplexity.py",
        "            return dataclasses.replace(loaded, trained_on=trained_on(folder))\n",
        "            return loaded\n",
        (_PRUNED + "evaluate_model_of_deleted_checkpoint_gives_same_result",),
    ),
    Mutant(
        "references stored for a newer checkpoint than the loaded one",
        "firstlight/training/starting_model.py",
        "ModelIdentity(base_name(init_from, folder), base_identity(folder))",
        "ModelIdentity(str(init_from), base_identity(resolve_model_folder(init_from)))",
        (_PREFERENCE + "preference_references_are_those_of_loaded_checkpoint",),
    ),
    # Data: order and position
    Mutant(
        "every epoch in the order of the first",
        _CORPUS,
        "shuffled_index(index, rows, seed, epoch)",
        "shuffled_index(index, rows, seed, 0)",
        (_DATA + "loader_resumed_in_second_epoch_keeps_its_order",),
    ),
    Mutant(
        "epoch forgotten on resume",
        _LOADER,
        "self.rows_seen = rows_seen\n        self._readers",
        "self.rows_seen = rows_seen % self.rows_per_epoch\n        self._readers",
        (_DATA + "loader_resumed_twice_yields_same_rows",),
    ),
    Mutant(
        "run stops at the end of an epoch",
        "firstlight/training/run.py",
        "or self.state.step < self.max_steps",
        "or self.state.step < self.max_steps and self.state.rows_seen "
        "!= num_rows(self.dataset.num_tokens, self.seq_len)",
        (_DATA + "run_resumed_at_epoch_end_trains_to_the_end",),
    ),
    Mutant(
        "data before the position read again",
        _LOADER,
        "        self._read_ahead()\n\n    def __enter__",
        "        self.rows_seen = 0\n"
        "        while self.rows_seen < rows_seen:\n"
        "            self.next_batch()\n"
        "        self._read_ahead()\n\n    def __enter__",
        (_DATA + "loader_resume_does_not_read_earlier_data_again",),
    ),
    Mutant(
        "every rank reads the rows of rank 0",
        _LOADER,
        "first = global_first + self.rank * self.micro_batch_size",
        "first = global_first",
        (_DATA + "loader_resume_restores_position_of_every_rank",),
    ),
    Mutant(
        "ranks count only their own rows",
        _LOADER,
        "self.rows_seen += self.global_rows",
        "self.rows_seen += self.micro_batch_size",
        (_DATA + "loader_resume_restores_position_of_every_rank", _ORDER),
    ),
    Mutant(
        "ranks prefetch each other's rows",
        _LOADER,
        "len(self._ahead) * self.global_rows",
        "len(self._ahead) * self.micro_batch_size",
        (_ORDER,),
    ),
    Mutant(
        "prefetched rows count as seen",
        _LOADER,
        'return {"rows_seen": self.rows_seen}',
        'return {"rows_seen": self.rows_seen + len(self._ahead) * self.global_rows}',
        (_DATA + "loader_resume_yields_rows_read_ahead", _ORDER),
    ),
    Mutant(
        "fastest reader served first",
        _LOADER,
        "            batch = self._ahead[0].result()\n            self._ahead.popleft()\n",
        "            from concurrent.futures import FIRST_COMPLETED, wait\n"
        "            ready = next(iter(wait(self._ahead, return_when=FIRST_COMPLETED).done))\n"
        "            self._ahead.remove(ready)\n"
        "            batch = ready.result()\n",
        (_DATA + "loader_batches_keep_order_whichever_reader_finishes_first",),
    ),
    # Data: rows and labels
    Mutant(
        "last partial row lost",
        _CORPUS,
        "return -(-max(num_tokens - 1, 0) // seq_len)",
        "return max(num_tokens - 1, 0) // seq_len",
        (_DATA + "loader_last_partial_row_of_epoch_is_kept", _ORDER),
    ),
    Mutant(
        "last token of a row not predicted",
        _CORPUS,
        "row * seq_len + seq_len + 1)",
        "row * seq_len + seq_len)",
        (_DATA + "loader_last_token_of_row_is_predicted",),
    ),
    Mutant(
        "17-bit ids stored in 16 bits",
        _SHARDS,
        'np.dtype("<u2") if vocab_size <= 1 << 16',
        'np.dtype("<u2") if vocab_size <= 1 << 17',
        (_DATA + "prepare_ids_above_65535_do_not_overflow",),
    ),
    Mutant(
        "shards with too few bytes per token read",
        _SHARDS,
        "if shard.itemsize < token_dtype(vocab_size).itemsize:",
        "if False:",
        (_DATA + "prepared_shards_with_too_few_bytes_per_token_raise_data_error",),
    ),
    Mutant(
        "ids that do not fit are written",
        "firstlight/data/encoding.py",
        "if len(ids) and int(ids.max()) >= vocab_size:",
        "if False:",
        (_DATA + "prepare_tokenizer_with_ids_beyond_vocabulary_raises_data_error",),
    ),
    Mutant(
        "ids beyond the vocabulary read",
        _SHARDS,
        ">= vocab_size:",
        "> vocab_size:",
        (_DATA + "train_token_id_beyond_vocabulary_raises_before_model",),
    ),
    Mutant(
        "overlapping documents accepted",
        _SHARDS,
        "if not ascending or ",
        "if ",
        (_DATA + "dataset_invalid_document_offsets_raise_data_error",),
    ),
    Mutant(
        "documents outside of the shard accepted",
        _SHARDS,
        "if not ascending or (ends[0], ends[-1]) != (0, self.num_tokens):",
        "if not ascending:",
        (_DATA + "dataset_invalid_document_offsets_raise_data_error",),
    ),
    Mutant(
        "end-of-document token dropped",
        "firstlight/data/prepare.py",
        "after = [tokenizer.eos_token_id]",
        "after = [][:0]",
        (_DATA + "prepare_keeps_end_of_document_token",),
    ),
    Mutant(
        "shard read twice",
        _CORPUS,
        "if len(set(names)) != len(names):",
        "if False:",
        (_DATA + "dataset_shard_listed_twice_raises_data_error",),
    ),
    Mutant(
        "prompts are labels",
        _EXAMPLES,
        "labels[position:end][loss_mask[1:]] = tokens[1:][loss_mask[1:]]",
        "labels[position:end] = tokens[1:]",
        (_PACKED + "packed_rows_hold_whole_examples_as_documents_with_labels",),
    ),
    Mutant(
        "examples attend to each other",
        _EXAMPLES,
        "loss_mask[1:]]\n            document_ids[position:end] = number",
        "loss_mask[1:]]\n            document_ids[position:end] = 0",
        (_PACKED + "packed_batch_gradient_equals_that_of_single_examples",),
    ),
    Mutant(
        "long examples cut silently",
        _EXAMPLES,
        'if len(long) and self.long == "refuse":',
        "if False:",
        (_PACKED + "packing_too_long_examples_raise_and_name_longest",),
    ),
    Mutant(
        "end-of-turn tokens are not labels",
        "firstlight/tokenizer/chat_labels.py",
        "return specials[-1].end()",
        "return specials[-1].start()",
        (_LABELS + "chat_labels_cover_answers_and_end_tokens_only",),
    ),
    Mutant(
        "prompt tokens are labels",
        "firstlight/tokenizer/chat_labels.py",
        "first = bool(own[min(start, len(own) - 1)])",
        "first = bool(own[max(end - 1, 0)])",
        (_LABELS + "chat_labels_token_starting_in_prompt_is_not_learned",),
    ),
    Mutant(
        "validation loss is a mean of means",
        "firstlight/evaluation/perplexity.py",
        "losses.append(RowLoss(part[0], float(loss), batch.num_terms))",
        "losses.append(RowLoss(part[0], float(loss) / batch.num_terms, 1))",
        (_DATA + "validation_loss_is_mean_over_tokens_not_batches",),
    ),
    Mutant(
        "data of another tokenizer accepted",
        "firstlight/training/start.py",
        "if (tokenizer.fingerprint, tokenizer.vocab_size) != (",
        "if False and (tokenizer.fingerprint, tokenizer.vocab_size) != (",
        (_DATA + "dataset_with_other_tokenizer_raises_data_error",),
    ),
    # Checkpoints
    Mutant(
        "incomplete folder selected",
        "firstlight/checkpoint/manifest.py",
        "if step is None or not (folder / MANIFEST_NAME).is_file():",
        "if step is None:",
        (_CHECKPOINTS + "newest_checkpoint_ignores_partial_folder",),
    ),
    Mutant(
        "run resumed from a damaged checkpoint",
        "firstlight/checkpoint/checkpoint.py",
        'if sha256_of(path) != entry["sha256"]:',
        "if False:",
        (_CHECKPOINTS + "resume_skips_damaged_checkpoint",),
    ),
    Mutant(
        "limit of one checkpoint deletes all",
        "firstlight/checkpoint/retention.py",
        "if one.folder not in kept:",
        "if one.folder not in kept or config.keep_last == 1:",
        (_CHECKPOINTS + "prune_with_limit_of_one_keeps_only_checkpoint",),
    ),
    Mutant(
        "old checkpoint deleted before the new one is saved",
        "firstlight/checkpoint/saver.py",
        "            folder = save_checkpoint(",
        "            import shutil\n\n"
        "            shutil.rmtree(self._run_folder / 'checkpoints', ignore_errors=True)\n"
        "            folder = save_checkpoint(",
        (_CHECKPOINTS + "save_keeps_old_checkpoint_until_new_one_exists",),
    ),
    Mutant(
        "old checkpoint deleted before the new one is verified",
        "firstlight/checkpoint/saver.py",
        "            verify_checkpoint(folder, from_disk=True)\n",
        "",
        (_CHECKPOINTS + "save_keeps_old_checkpoint_until_new_one_exists",),
    ),
    Mutant(
        "retention by step after a rollback",
        "firstlight/checkpoint/saver.py",
        "        after = self._parent\n",
        "        after = None\n",
        (_CHECKPOINTS + "prune_after_rollback_keeps_newest_save",),
    ),
    Mutant(
        "dead branches counted",
        "firstlight/checkpoint/manifest.py",
        "if one.sequence and not any(two.leaves_behind(one) for two in saved)",
        "if one.sequence",
        (_CHECKPOINTS + "prune_damaged_newest_checkpoint_does_not_displace_good_one",),
    ),
    Mutant(
        "worst checkpoint kept as the best",
        "firstlight/checkpoint/retention.py",
        "best_first(past)[:keep_best]",
        "best_first(past)[-keep_best:]",
        (_CHECKPOINTS + "prune_keeps_old_best_checkpoint",),
    ),
    Mutant(
        "checkpoint with NaN weights saved",
        "firstlight/checkpoint/checkpoint.py",
        "    require_finite(step, checkpoint.model)\n"
        "    require_finite(step, checkpoint.optimizer)\n",
        "",
        (_CHECKPOINTS + "prune_nan_checkpoints_do_not_displace_good_ones",),
    ),
    Mutant(
        "checkpoint with NaN moments saved",
        "firstlight/checkpoint/checkpoint.py",
        "    require_finite(step, checkpoint.optimizer)\n",
        "",
        (_CHECKPOINTS + "prune_nan_checkpoints_do_not_displace_good_ones",),
    ),
    Mutant(
        "asynchronous save writes later weights",
        "firstlight/checkpoint/saver.py",
        "buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)",
        "self._buffers[name] = tensor.detach()",
        (_CHECKPOINTS + "asynchronous_save_holds_values_at_time_of_call",),
    ),
    Mutant(
        "asynchronous save writes a later state",
        "firstlight/checkpoint/saver.py",
        "copy.deepcopy(checkpoint.trainer_state)\n        carried",
        "checkpoint.trainer_state\n        carried",
        (_CHECKPOINTS + "asynchronous_save_holds_values_at_time_of_call",),
    ),
    Mutant(
        "failed save not reported",
        "firstlight/checkpoint/saver.py",
        "self._writing.result()\n        finally:",
        "self._writing.exception()\n        finally:",
        (_CHECKPOINTS + "asynchronous_save_failure_is_raised",),
    ),
    Mutant(
        "wrong step saved",
        "firstlight/training/checkpoints.py",
        '            "random": rest,\n',
        '            "random": rest,\n            "step": run.state.step + 1,\n',
        (_CHECKPOINTS + "save_records_correct_step",),
    ),
    Mutant(
        "random states not restored",
        "firstlight/training/state.py",
        "    restore_own_states(randoms, program, state.step)\n",
        "",
        (_CHECKPOINTS + "resume_restores_random_numbers_at_right_moment",),
    ),
    Mutant(
        "some weights not saved",
        "firstlight/parallel/engine.py",
        "StateTensors(tensors_of(model), ",
        'StateTensors({n: t for n, t in tensors_of(model).items() if "norm" not in n}, ',
        (_CHECKPOINTS + "saved_run_can_be_loaded_and_resumed",),
    ),
    Mutant(
        "missing weights are random",
        "firstlight/weights/loading.py",
        '("lacks", sorted(expected.keys() - given.keys()))',
        '("lacks", [])',
        (_CHECKPOINTS + "load_model_with_missing_weights_raises",),
    ),
    Mutant(
        "untied head dropped",
        "firstlight/weights/loading.py",
        "if head is not None and not head.has_values_of(stored[embedding]):",
        "if False:",
        (_CHECKPOINTS + "load_untied_head_with_tied_config_raises",),
    ),
    Mutant(
        "metrics lines written twice",
        "firstlight/run_log/writer.py",
        'if record["step"] <= step]',
        "]",
        (_CHECKPOINTS + "metrics_lines_are_not_duplicated_after_resume",),
    ),
    Mutant(
        "mapped file overwritten",
        "firstlight/weights/stored.py",
        "if now.identity == self.identity and now.state != self.state:",
        "if False:",
        (_TEXT + "mapped_file_overwritten_in_place_raises",),
    ),
    # Tokens, chats, sampling
    Mutant(
        "added tokens fill gaps in the ids",
        "firstlight/tokenizer/parts.py",
        "if any(extended.token_to_id(t) != i for i, t in enumerate(tokens, start=first_id)):",
        "if False:",
        (_TEXT + "added_tokens_get_unused_ids",),
    ),
    Mutant(
        "tied head untied",
        "firstlight/weights/loading.py",
        '"vocab_size": vocab_size})\n    model.finish_loading()\n',
        '"vocab_size": vocab_size})\n',
        (_TEXT + "added_tokens_keep_head_tied",),
    ),
    Mutant(
        "bos token added twice",
        "firstlight/tokenizer/tokenizer.py",
        "        return [token_id for some in ids for token_id in some]\n",
        "        return [self.separator_id, *(token_id for some in ids for token_id in some)]\n",
        (_TEXT + "chat_prompt_contains_one_beginning_of_text_token",),
    ),
    Mutant(
        "messages can write control tokens",
        "firstlight/tokenizer/chat_template.py",
        'return special.sub(lambda match: f"{before}{match[0]}{after}", value)',
        "return value",
        (_TEXT + "chat_message_cannot_write_control_tokens",),
    ),
    Mutant(
        "texts can write control tokens",
        "firstlight/tokenizer/tokenizer.py",
        "backend.encode_special_tokens = True",
        "backend.encode_special_tokens = False",
        (_TEXT + "chat_message_cannot_write_control_tokens",),
    ),
    Mutant(
        "incomplete character streamed",
        "firstlight/tokenizer/tokenizer.py",
        '        if text.endswith("\\ufffd"):\n            return ""\n',
        "",
        (_TEXT + "text_stream_never_splits_character_of_several_tokens",),
    ),
    Mutant(
        "padding id sampled",
        "firstlight/models/language_model.py",
        "return soft_capped(self.lm_head(x_BTC)[..., :vocab_size], softcap)",
        "return soft_capped(self.lm_head(x_BTC), softcap)",
        (_TEXT + "generate_never_samples_vocabulary_padding",),
    ),
    Mutant(
        "temperature 0 treated as 0.8",
        "firstlight/generation/engine.py",
        '"logit_bias": logit_bias or {}}',
        '"logit_bias": logit_bias or {}, "temperature": temperature or 0.8}',
        (_TEXT + "temperature_zero_stays_greedy",),
    ),
    Mutant(
        "unlimited number of tokens",
        "firstlight/generation/batch.py",
        "self.max_tokens = min(max_tokens, model.config.max_position_embeddings)",
        "self.max_tokens = max_tokens",
        (_TEXT + "generate_large_token_limit_allocates_no_extra_memory",),
    ),
    Mutant(
        "samples use the run's random generator",
        "firstlight/generation/sampling.py",
        "torch.rand(64, dtype=torch.float64, generator=generator)",
        "torch.rand(64, dtype=torch.float64)",
        (_TEXT + "samples_during_training_do_not_change_random_state",),
    ),
    # Opening files
    Mutant(
        "pickles executed",
        "firstlight/conversion/pickled.py",
        'torch.load(path, map_location="cpu", weights_only=True',
        'torch.load(path, map_location="cpu", weights_only=False',
        (_TEXT + "load_pickle_with_code_raises_and_runs_nothing",),
    ),
    Mutant(
        "template code executed",
        "firstlight/tokenizer/chat_template.py",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment",
        "from jinja2 import Environment as ImmutableSandboxedEnvironment",
        (_TEXT + "chat_template_cannot_run_code",),
    ),
    Mutant(
        "unknown keys ignored",
        "firstlight/section.py",
        'extra="forbid"',
        'extra="ignore"',
        (_TEXT + "recipe_unknown_key_raises_config_error",),
    ),
    # CUDA: devices, dtypes and waits
    Mutant(
        "labels stay on the host",
        _LOADER,
        "            change(self.labels),\n",
        "            self.labels,\n",
        (_FAKE_STEPS + "train_step_runs_on_gpu_in_its_precision",),
    ),
    Mutant(
        "document ids stay on the host",
        _LOADER,
        "None if self.document_ids is None else change(self.document_ids)",
        "self.document_ids",
        (_FAKE_STEPS + "document_masking_uses_kernels_that_take_masks",),
    ),
    Mutant(
        "references of pairs stay on the host",
        _LOADER,
        "None if self.references is None else change(self.references)",
        "self.references",
        (_FAKE_STEPS + "preference_step_stays_on_gpu",),
    ),
    Mutant(
        "evaluation batch stays on the host",
        "firstlight/evaluation/perplexity.py",
        "moved = batch.to(device)",
        "moved = batch",
        (_FAKE_RUNS + "evaluation_runs_on_gpu",),
    ),
    Mutant(
        "answers of pairs counted on the host",
        "firstlight/training/preference.py",
        "numbers_D1 = torch.arange(documents, device=labels_BT.device)[:, None]",
        "numbers_D1 = torch.arange(documents)[:, None]",
        (_FAKE_STEPS + "preference_step_stays_on_gpu",),
    ),
    Mutant(
        "causal mask on the host",
        "firstlight/models/ops.py",
        "torch.ones(new, total, dtype=torch.bool, device=device)",
        "torch.ones(new, total, dtype=torch.bool)",
        (_FAKE_STEPS + "each_attention_setting_uses_its_kernel",),
    ),
    Mutant(
        "document positions on the host",
        "firstlight/models/ops.py",
        "torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)",
        "torch.arange(document_ids_BT.shape[1])",
        (_FAKE_STEPS + "document_masking_uses_kernels_that_take_masks",),
    ),
    Mutant(
        "CPU autocast used on a GPU",
        "firstlight/methods/precision.py",
        "return torch.autocast(device.type, dtype=dtype, cache_enabled=False)",
        'return torch.autocast("cpu", dtype=dtype, cache_enabled=False)',
        (_FAKE_STEPS + "train_step_runs_on_gpu_in_its_precision",),
    ),
    Mutant(
        "DoRA norms in half precision",
        "firstlight/lora/layers.py",
        "torch.autocast(self.lora_A.device.type, enabled=False)",
        'torch.autocast("cpu", enabled=False)',
        (_FAKE_STEPS + "dora_norms_are_fp32_under_autocast",),
    ),
    Mutant(
        "documents computed by a kernel without mask support",
        "firstlight/methods/attention.py",
        'return "flex" if not dropout and compiles else "sdpa"',
        'return "flash"',
        (_FAKE_STEPS + "document_masking_uses_kernels_that_take_masks",),
    ),
    Mutant(
        "cuDNN attention used for growing texts",
        "firstlight/methods/attention.py",
        "cuda.enable_cudnn_sdp(False)",
        "cuda.enable_cudnn_sdp(True)",
        (
            "tests/gpu/test_fake_generation.py::"
            "test_batch_with_joining_and_leaving_texts_stays_on_gpu",
        ),
    ),
    Mutant(
        "scores of grouped queries stored",
        "firstlight/models/ops.py",
        "if not _takes_groups(q_BHTD, options):",
        "if False:",
        ("tests/gpu/test_fake_families.py::test_grouped_query_attention_keeps_no_scores",),
    ),
    Mutant(
        "wrong attention kernel selected",
        "firstlight/methods/attention.py",
        '"efficient": SDPBackend.EFFICIENT_ATTENTION',
        '"efficient": SDPBackend.FLASH_ATTENTION',
        (_FAKE_STEPS + "each_attention_setting_uses_its_kernel",),
    ),
    Mutant(
        "grouped products in dtypes that CUDA does not support",
        "firstlight/models/moe.py",
        "return aligned and modern and dtype == torch.bfloat16",
        "return aligned and modern",
        (_FAKE_STEPS + "grouped_matmul_is_used_where_cuda_supports_it",),
    ),
    Mutant(
        "wait for the GPU in each micro-batch",
        "firstlight/training/step.py",
        "else total + loss.detach()",
        "else total + float(loss)",
        (_FAKE_STEPS + "train_step_waits_once_for_loss_and_norm_after_update",),
    ),
    Mutant(
        "loss of one micro-batch stays in a graph's memory",
        "firstlight/training/step.py",
        "total = loss.detach().clone() if",
        "total = loss.detach() if",
        (_FAKE_RUNS + "train_step_sums_loss_in_memory_reused_by_cuda_graph",),
    ),
    Mutant(
        "fused step counters on the host",
        "firstlight/optim/spec.py",
        '"cpu" if key == "step" and not fused else parameter.device',
        '"cpu" if key == "step" else parameter.device',
        (_FAKE_STEPS + "optimizer_moments_are_restored_to_their_device",),
    ),
    Mutant(
        "master weights on the host",
        "firstlight/optim/optimizer.py",
        "return given.detach().to(parameter.device)",
        "return given.detach().cpu()",
        (_FAKE_STEPS + "train_step_runs_on_gpu_in_its_precision",),
    ),
    Mutant(
        "unused memory never released",
        "firstlight/training/program.py",
        "if every and self._steps % every == 0 and",
        "if every and self._steps % every == 1 and",
        (_FAKE_STEPS + "unused_memory_is_released_at_fixed_step_interval",),
    ),
    Mutant(
        "resumed run decides its number of steps again",
        "firstlight/training/time_budget.py",
        '(record.get("max_minutes"), record.get("most_steps")) == (minutes, most)',
        '(record.get("max_minutes"), record.get("most_steps")) == (-minutes, most)',
        (_MINUTES + "timed_run_killed_and_resumed_keeps_decision",),
    ),
    Mutant(
        "step limit of a time-limited run ignored",
        "firstlight/training/time_budget.py",
        "        steps_left = min(steps_left, most_left)\n",
        "",
        (_MINUTES + "timed_run_ends_at_first_of_two_limits",),
    ),
    Mutant(
        "number of steps not on disk when the learning rate falls",
        "firstlight/training/run.py",
        "        wait_for_main(self.engine, self.write_budget)\n",
        "        pass\n",
        (_MINUTES + "timed_run_killed_and_resumed_keeps_decision",),
    ),
    Mutant(
        "corrected decay falls from the peak again",
        "firstlight/optim/schedule.py",
        "                done += (1 - done) * (at - begin) / (steps - begin)\n",
        "",
        (_MINUTES + "corrected_decay_continues_from_reached_rate",),
    ),
    Mutant(
        "resumed run corrects its number of steps",
        "firstlight/training/time_budget.py",
        "isinstance(self.length, DecidedLength) or step == self._next_check_step",
        "isinstance(self.length, DecidedLength) or step % 5 == 0",
        (_MINUTES + "timed_run_resumed_keeps_corrected_step_count",),
    ),
    Mutant(
        "time before a kill not counted",
        "firstlight/training/time_budget.py",
        '    return {**record, "seconds_used": max(used) or steps_took}\n',
        '    return {**record, "seconds_used": 0.0}\n',
        (_MINUTES + "timed_run_time_used_before_kill_counts",),
    ),
    Mutant(
        "full memory kept after running out",
        "firstlight/training/out_of_memory.py",
        '    gc.collect()\n    if run.program.hardware.device.type == "cuda":\n'
        "        torch.cuda.empty_cache()\n",
        "    gc.collect()\n",
        (_FAKE_RUNS + "out_of_memory_releases_memory_before_next_try",),
    ),
    Mutant(
        "asynchronous save not waited for",
        "firstlight/checkpoint/saver.py",
        "            torch.cuda.synchronize(device)\n",
        "            pass\n",
        (_LATE + "snapshot_is_complete_when_returned",),
    ),
    Mutant(
        "asynchronous save waits for another GPU",
        "firstlight/checkpoint/saver.py",
        "            torch.cuda.synchronize(device)\n",
        "            torch.cuda.synchronize()\n",
        (_LATE + "snapshot_is_complete_when_returned",),
    ),
    Mutant(
        "save through pageable memory",
        "firstlight/checkpoint/saver.py",
        "pin_memory=tensor.is_cuda",
        "pin_memory=False",
        (_LATE + "snapshot_is_complete_when_returned",),
    ),
    Mutant(
        "page-locked memory overwritten too early",
        "firstlight/checkpoint/saver.py",
        "        self.wait()\n        checkpoint = capture()\n        if",
        "        checkpoint = capture()\n        if",
        (_LATE + "checkpoint_holds_state_at_save_while_training_continues",),
    ),
    Mutant(
        "wait for each tensor of a save",
        "firstlight/parallel/engine.py",
        "StateTensors(tensors_of(model), ",
        "StateTensors(on_cpu(tensors_of(model)), ",
        (_LATE + "asynchronous_save_blocks_run_for_one_copy_of_state",),
    ),
    Mutant(
        "activations used before they are copied back",
        "firstlight/methods/memory.py",
        "        torch.cuda.current_stream(self._device).wait_event(event)\n        self._drop",
        "        self._drop",
        (_LATE + "offloaded_activations_are_copied_in_background_and_restored_in_time",),
    ),
    Mutant(
        "wait for each activation",
        "firstlight/methods/memory.py",
        'device="cpu", pin_memory=True',
        'device="cpu"',
        (_LATE + "offloaded_activations_are_page_locked_and_restored",),
    ),
    Mutant(
        "activations not copied back",
        "firstlight/methods/memory.py",
        "return _copies(packed.device).bring_back(packed)",
        "return packed.kept",
        (_LATE + "offloaded_activations_are_page_locked_and_restored",),
    ),
    Mutant(
        "batches in pageable memory",
        _LOADER,
        "return batch.pin_memory() if self.pin_memory else batch",
        "return batch",
        (_LATE + "loader_batches_are_page_locked_and_uploaded_without_wait",),
    ),
    Mutant(
        "wait for each batch",
        _LOADER,
        "tensor.to(device, non_blocking=True)",
        "tensor.to(device)",
        (_LATE + "loader_batches_are_page_locked_and_uploaded_without_wait",),
    ),
    Mutant(
        "keys and values on the host",
        "firstlight/models/cache.py",
        "torch.zeros(batch_size, K, max_tokens, size, dtype=dtype, device=device)",
        "torch.zeros(batch_size, K, max_tokens, size, dtype=dtype)",
        (_FAKE_TEXT + "batch_with_joining_and_leaving_texts_stays_on_gpu",),
    ),
    Mutant(
        "linear-attention states on the host",
        "firstlight/models/cache.py",
        "torch.zeros(batch_size, *shape, dtype=wide, device=device)",
        "torch.zeros(batch_size, *shape, dtype=wide)",
        (_FAKE_FAMILIES + "generation_of_each_family_stays_on_gpu",),
    ),
    Mutant(
        "linear-attention mask on the host",
        "firstlight/models/qwen3_next.py",
        "torch.ones(size, size, dtype=torch.bool, device=q.device).tril()",
        "torch.ones(size, size, dtype=torch.bool).tril()",
        (_FAKE_FAMILIES + "generation_of_each_family_stays_on_gpu",),
    ),
    Mutant(
        "expert indices with biases on the host",
        "firstlight/models/gpt_oss.py",
        "torch.arange(len(self.down_proj), device=x_MC.device)",
        "torch.arange(len(self.down_proj))",
        (_FAKE_FAMILIES + "generation_of_each_family_stays_on_gpu",),
    ),
    Mutant(
        "expert indices on the host",
        "firstlight/models/moe.py",
        "torch.arange(num_experts, device=experts_NK.device)",
        "torch.arange(num_experts)",
        (_FAKE_STEPS + "train_step_runs_on_gpu_in_its_precision",),
    ),
    Mutant(
        "text lengths on the host",
        "firstlight/generation/batch.py",
        "torch.zeros(max_sequences, dtype=torch.int64, device=device) for _ in range(2)",
        "torch.zeros(max_sequences, dtype=torch.int64) for _ in range(2)",
        (_FAKE_TEXT + "batch_with_joining_and_leaving_texts_stays_on_gpu",),
    ),
    Mutant(
        "8-bit weights on a GPU",
        "firstlight/generation/engine.py",
        'if dtype == "int8" and torch.device(device).type == "cuda":',
        "if False:",
        ("tests/generation/test_int8.py::test_load_int8_on_gpu_raises_config_error",),
    ),
    Mutant(
        "weights become constants on a GPU",
        "firstlight/generation/batch.py",
        'freezing=device.type == "cpu"',
        "freezing=True",
        (_FAKE_TEXT + "compiled_step_on_gpu_keeps_weights_as_arguments",),
    ),
    Mutant(
        "graph recorded before compilation",
        "firstlight/generation/batch.py",
        "                self._by_shape.popitem(last=False)\n"
        "            return super()._run(rows, reach)\n",
        "                self._by_shape.popitem(last=False)\n",
        (_COMPILED + "recorded_steps_record_shape_when_it_repeats",),
    ),
    Mutant(
        "recorded step uses the previous tokens",
        "firstlight/generation/batch.py",
        "            self._ids_B[: len(ids_B)] = ids_B\n",
        "",
        (_COMPILED + "recorded_steps_keep_tokens_and_lengths_on_device_for_same_sequences",),
    ),
    Mutant(
        "logits overwritten by the next recorded step",
        "firstlight/generation/batch.py",
        "return logits_BV.clone()",
        "return logits_BV",
        (_COMPILED + "recorded_steps_record_shape_when_it_repeats",),
    ),
    Mutant(
        "nondeterministic steps on a GPU",
        "firstlight/methods/compilation.py",
        '(kind == "cuda" and deterministic)',
        "False",
        (_SAME_BITS + "determinism_on_gpu_enables_deterministic_algorithms_if_requested",),
    ),
    Mutant(
        "weights loaded into host memory",
        "firstlight/weights/loading.py",
        "    allocate(model, device)\n    places = ",
        '    allocate(model, torch.device("cpu"))\n    places = ',
        (_FAKE_TEXT + "load_to_gpu_transfers_weights_in_parts",),
    ),
    Mutant(
        "first GPU used by every process",
        "firstlight/parallel/group.py",
        "index = 0 if count == 1 else world.local_rank",
        "index = 0",
        (_FAKE_RANKS + "each_process_takes_gpu_of_its_local_rank",),
    ),
    Mutant(
        "GPU selected by global rank",
        "firstlight/parallel/group.py",
        "index = 0 if count == 1 else world.local_rank",
        "index = 0 if count == 1 else world.rank",
        (_FAKE_RANKS + "each_process_takes_gpu_of_its_local_rank",),
    ),
    Mutant(
        "current GPU not set",
        "firstlight/training/processes.py",
        "        torch.cuda.set_device(device)\n",
        "        pass\n",
        (_FAKE_RANKS + "each_process_takes_gpu_of_its_local_rank",),
    ),
    Mutant(
        "GPU gradients sent with the CPU's library",
        "firstlight/parallel/group.py",
        '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",',
        '"gloo",',
        (_FAKE_RANKS + "each_process_takes_gpu_of_its_local_rank",),
    ),
    Mutant(
        "NCCL guesses the GPU",
        "firstlight/parallel/group.py",
        'device_id=device if device.type == "cuda" else None',
        "device_id=None",
        (_FAKE_RANKS + "each_process_takes_gpu_of_its_local_rank",),
    ),
    Mutant(
        "fsdp shards sent through the CPU",
        "firstlight/parallel/sharding.py",
        "self.device.type, tuple(sizes.values())",
        '"cpu", tuple(sizes.values())',
        (_FAKE_RANKS + "fsdp_uses_nccl_on_gpus",),
    ),
    Mutant(
        "clock stopped before the GPU has finished",
        "firstlight/hardware/device.py",
        "torch.cuda.synchronize(device)",
        "torch.cuda.synchronize()",
        (_FAKE_RANKS + "memory_and_time_are_measured_on_requested_device",),
    ),
    Mutant(
        "random state of only the first GPU",
        "firstlight/training/state.py",
        "enumerate(torch.cuda.get_rng_state_all())",
        "enumerate([torch.cuda.get_rng_state()])",
        (_FAKE_RANKS + "random_states_of_every_gpu_are_saved_and_restored",),
    ),
    Mutant(
        "random state restored to another GPU",
        "firstlight/training/state.py",
        "torch.cuda.set_rng_state(tensor, int(index[0]))",
        "torch.cuda.set_rng_state(tensor)",
        (_FAKE_RANKS + "random_states_of_every_gpu_are_saved_and_restored",),
    ),
    # Power cuts
    Mutant(
        "files renamed before they are on disk",
        "firstlight/files/disk.py",
        "                disk.sync(self._file)\n",
        "",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "rename of a checkpoint not synced",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n\n\n@contextlib.contextmanager\ndef _locked",
        "\n\n@contextlib.contextmanager\ndef _locked",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "directory entries of a checkpoint not synced",
        _ATOMIC,
        "                _sync_tree(temporary, files=not synced)\n",
        "",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "rename of a run folder not synced",
        "firstlight/checkpoint/run_folder.py",
        "            make_folder(folder)\n",
        "            folder.mkdir(parents=True, exist_ok=True)\n",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "old checkpoint emptied before its name is removed",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n    _remove(aside)\n",
        "    _remove(aside)\n",
        (_LOST_CHECKPOINTS,),
    ),
    Mutant(
        "old shards deleted before the new ones are renamed",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n        _remove(old)\n",
        "        _remove(old)\n",
        (_LOST_DATA + "prepared_shards_after_power_cut_are_whole_or_rejected",),
    ),
    Mutant(
        "rename of a replaced file not synced",
        _ATOMIC,
        "        seam.disk.sync_folder(path.parent)\n\n\ndef write_file",
        "\n\ndef write_file",
        (_LOST_DATA + "measured_gpus_after_power_cut_are_whole_or_measured_again",),
    ),
    Mutant(
        "logs not synced before a checkpoint",
        "firstlight/run_log/writer.py",
        "        self._metrics.sync()\n",
        "",
        (_LOST + "synced_log_lines_survive_power_cut",),
    ),
    Mutant(
        "name of a new log not synced",
        "firstlight/files/disk.py",
        "                disk.sync_folder(path.parent)\n",
        "",
        (_LOST + "synced_log_lines_survive_power_cut",),
    ),
    Mutant(
        "damaged log removed before the new one exists",
        _ATOMIC,
        "            seam.disk.link(path, aside)\n",
        "            seam.disk.rename(path, aside)\n",
        (_LOST + "second_power_cut_during_log_repair_loses_no_line",),
    ),
    Mutant(
        "compiled kernel not synced",
        "firstlight/generation/few_rows.py",
        "            write_file(library, built.read_bytes())\n",
        "            built.replace(library)\n",
        (_LOST_DATA + "compiled_kernel_after_power_cut_is_whole_or_recompiled",),
    ),
]
