"""Sums of the scores over the views of a video. All meters need those of detection."""

import torch

import slowfast.utils.ava_eval_helper as ava_eval_helper


class TestMeter:
    def __init__(self, num_views):
        self.num_views, self.scores = num_views, {}
        self.fields = ava_eval_helper.FIELDS

    def update_stats(self, scores, indices):
        for index, score in zip(indices.tolist(), scores):
            video = index // self.num_views
            self.scores[video] = self.scores.get(video, 0) + score

    def sums(self):
        return torch.stack([self.scores[video] for video in sorted(self.scores)])
