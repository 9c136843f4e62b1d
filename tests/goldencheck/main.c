/* golden_check [--device NAME] [--bf16 | --grid SEED] PATH...: finds cases, runs those whose kind is known, and counts.
 * With --bf16 those of a model run once more, in bf16 and with the decisions of the run before; with --grid (on the
 * cpu, forward and backward alone) in fp32 that is rounded as bf16 would be, on a grid shifted by chance. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/text.h"
#include "case.h"

static const struct kind {
    const char *name;
    void (*run)(struct golden_case *c);
    int model;  /* 1: runs again in bf16; 2: on a grid too, for grid.c has all that it runs */
} kinds[] = {
    {"hf_forward", run_hf_forward, 2},
    {"ref_model", run_ref_model, 2},
    {"hf_bf16", run_hf_bf16, 0},
    {"indexer_kl", run_indexer_kl, 1},
    {"mtp_base", run_mtp_base, 1},
    {"mtp_ce", run_mtp_ce, 1},
    {"mtp_tv", run_mtp_tv, 1},
    {"trajectory", run_trajectory, 1},
    {"topk_select", run_topk_select, 0},
    {"rope", run_rope, 0},
    {"adamw_clip_lr", run_adamw_clip_lr, 0},
    {"muon", run_muon, 0},
    {"muon_split", run_muon_split, 0},
    {"router_aux", run_router_aux, 0},
    {"flops", run_flops, 0},
    {"fp8_block", run_fp8_block, 0},
    {"mxfp8", run_mxfp8, 0},
};

static int passed, failed, skipped, in_bf16;
int golden_grid = -1;

static void fail_path(const char *path, const char *why)
{
    printf("%s: %s  FAILED\n", path, why);
    failed++;
}

static const struct kind *find_kind(const char *name)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kinds[i].name, name)) return &kinds[i];
    return NULL;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

static int is_case_name(const char *base)
{
    return text_ends_with(base, ".json") && strlen(base) > strlen(".json") && strcmp(base, "config.json") &&
           !text_ends_with(base, ".index.json");
}

/* Once more: gradients of min(p, q) and of the indexer's relus jump at a kink, and this run says itself on which side
 * it is. */
static void show_own_sides(const struct kind *kind, struct golden_case *c)
{
    int64_t otherwise, of;
    int compared = c->compared;

    c->own_sides = 1;
    guide_give("_side");
    kind->run(c);
    c->own_sides = 0;
    c->compared = compared;
    guide_otherwise(&otherwise, &of);
    if (!guide_followed() || !of) case_fail(c, "bf16, own sides: they were not asked for as in fp32");
    printf("  bf16, own sides: %lld of %lld numbers are on the other side of a kink, %d tensors beyond the band\n",
           (long long)otherwise, (long long)of, c->beyond);
}

static void run_bf16_case(const struct kind *kind, struct golden_case *c)
{
    int compared = c->compared;

    c->bf16 = 1;
    c->compared = 0;
    guide_give(NULL);
    kind->run(c);
    if (!guide_followed()) case_fail(c, "bf16: other decisions were asked for than fp32 made");
    if (!c->compared) case_fail(c, "bf16: nothing was judged");
    c->compared += compared;
    if (guide_has("_side")) show_own_sides(kind, c);
}

static void run_case(const struct kind *kind, const char *path, json_t *sidecar)
{
    const json_t *format = json_object_get(sidecar, "format");
    struct golden_case c;

    printf("%s (%s)\n", path, kind->name);
    if (case_open(&c, path, sidecar)) {
        if (format && json_integer_value(format) != 1)
            case_fail(&c, "format %lld; this program reads format 1", (long long)json_integer_value(format));
        else
            kind->run(&c);
        if (in_bf16 && kind->model > (golden_grid >= 0)) run_bf16_case(kind, &c);
        guide_forget();
        if (!c.compared) case_fail(&c, "nothing was compared");
    }
    *(c.failures ? &failed : &passed) += 1;
    printf("%s %s\n", c.failures ? "FAILED" : "passed", c.name);
    case_close(&c);
}

/* named: the user gave this file, so a kind that is not known is a failure. */
static void check_file(const char *path, int named)
{
    const char *base = base_name(path), *given;
    char kind_name[256], why[400];
    const struct kind *kind;
    json_error_t error;
    json_t *sidecar;

    if (!is_case_name(base)) {
        fail_path(path, "not the sidecar (X.json) of a case");
        return;
    }
    if (!(sidecar = json_load_file(path, 0, &error)) || !json_is_object(sidecar)) {
        snprintf(why, sizeof why, "not a JSON object%s%s", sidecar ? "" : ": ", sidecar ? "" : error.text);
        fail_path(path, why);
        json_decref(sidecar);
        return;
    }
    given = json_string_value(json_object_get(sidecar, "kind"));
    if (given)
        snprintf(kind_name, sizeof kind_name, "%s", given);
    else
        snprintf(kind_name, sizeof kind_name, "%.*s", (int)(strlen(base) - strlen(".json")), base);
    if ((kind = find_kind(kind_name))) {
        run_case(kind, path, sidecar);
        return;
    }
    json_decref(sidecar);
    snprintf(why, sizeof why, "kind %s is not known", kind_name);
    if (named) {
        fail_path(path, why);
    } else {
        printf("%s: %s  skipped\n", path, why);
        skipped++;
    }
}

static int only_cases(const struct dirent *entry)
{
    return is_case_name(entry->d_name);
}

static void check_directory(const char *path)
{
    struct dirent **entry;
    int count = scandir(path, &entry, only_cases, alphasort);
    char file[2048];

    if (count < 0) {
        fail_path(path, "cannot be read");
        return;
    }
    for (int i = 0; i < count; i++) {
        snprintf(file, sizeof file, "%s/%s", path, entry[i]->d_name);
        check_file(file, 0);
        free(entry[i]);
    }
    free(entry);
}

int main(int argc, char **argv)
{
    struct stat status;

    int first = 1;

    if (argc > 2 && !strcmp(argv[1], "--device")) {
        golden_device = argv[2];
        first = 3;
    }
    if (argc > first && !strcmp(argv[first], "--bf16")) {
        in_bf16 = 1;
        first++;
    } else if (argc > first + 1 && !strcmp(argv[first], "--grid")) {
        in_bf16 = 1;
        golden_grid = atoi(argv[first + 1]);
        first += 2;
    }
    if (argc <= first) {
        fprintf(stderr, "usage: golden_check [--device NAME] [--bf16 | --grid SEED] PATH...  (a sidecar X.json, or a "
                        "directory of them)\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = first; i < argc; i++) {
        if (stat(argv[i], &status))
            fail_path(argv[i], "cannot be found");
        else if (S_ISDIR(status.st_mode))
            check_directory(argv[i]);
        else
            check_file(argv[i], 1);
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
