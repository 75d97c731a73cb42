// Pins what selection chooses for the problems of the benches on several GPUs. A change of a cost
// model shows in the table line by line.
//
//     choices.tsv         the pinned choices, a line each: GPU, problem key, algorithm, instance
//                         and slices ("none": no kernel takes the problem), predicted microseconds,
//                         what "auto" does ("=": it takes this instance, "xla": it leaves the
//                         layer to XLA, "-": the line asks for another algorithm), source
//     bench_problems.tsv  every problem of the benches, written by tools/bench_problems.py: "each"
//                         or "first", source, algorithm, operations, operands, the rest of the key.
//                         Operations and operands are lists: the line stands for all pairs.
//     never_chosen.tsv    the forms (family and device kernel) that "auto" takes for no problem of
//                         the benches
//
// choices.tsv contains
//   - all problems that bench_problems.tsv marks "each";
//   - as many of those marked "first" as needed: each instance that some problem of the benches
//     takes on some GPU has a line, one for each algorithm, filter layout, activation layout and
//     presence of statistics (Pin);
//   - problems that are in no bench; their source is "beside".
// The test fails if a line differs, if a prediction is off by more than a quarter, if an
// instance is chosen that has no line, and if never_chosen.tsv changes.
//
//     choices_test [FOLDER...]       compares the tables of each FOLDER (default: this file's
//                                    folder)
//     choices_test --write [FOLDER]  writes choices.tsv and never_chosen.tsv
//     choices_test --select          writes an answer for each line (GPU, key, algorithm) of
//                                    standard input: the selection, for tools/bench_problems.py;
//                                    the algorithm "pass" asks for the plan of a pass, "terms:xla"
//                                    and "terms:INSTANCE/SLICES" for the terms of a predicted time,
//                                    for tools/calibrate.py
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/common/folded_columns.h"
#include "cuda/common/instances.h"
#include "cuda/common/kernel.h"
#include "cuda/common/xla_cost.h"
#include "cuda/passes.h"
#include "cuda/registry.h"
#include "cuda/select.h"

namespace jaxconv {
namespace {

constexpr const char* kGpus[] = {"a100", "l40s", "rtx4090", "h100", "h200"};

// Two predictions agree up to this factor.
constexpr double kMostOff = 1.25;

constexpr char kBeside[] = "beside";
constexpr std::string_view kTerms = "terms:";

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The folder of the tables.
std::string& Folder() {
  static std::string& folder = *new std::string(__FILE__, std::string(__FILE__).rfind('/'));
  return folder;
}

std::string FileName(const char* name) { return Folder() + '/' + name; }

// The lines of a table without its comments, each split into `fields` fields.
std::vector<std::vector<std::string>> Read(const char* name, size_t fields) {
  std::vector<std::vector<std::string>> lines;
  std::ifstream file(FileName(name));
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    lines.push_back(Split(line, '\t'));
    if (lines.back().size() != fields) {
      std::printf("FAIL %s: expected %zu fields: %s\n", name, fields, line.c_str());
      std::exit(1);
    }
  }
  return lines;
}

// A problem key and an algorithm.
using Question = std::pair<std::string, std::string>;

struct BenchProblem {
  Question question;
  std::string source;
  bool each;
};

std::vector<BenchProblem> BenchProblems() {
  std::vector<BenchProblem> problems;
  for (const auto& fields : Read("bench_problems.tsv", 6)) {
    for (const std::string& op : Split(fields[3], ',')) {
      for (const std::string& operands : Split(fields[4], ',')) {
        const std::string key = op + " " + operands + " " + fields[5];
        problems.push_back({{key, fields[2]}, fields[1], fields[0] == "each"});
      }
    }
  }
  return problems;
}

// What a line of choices.tsv pins: the instance, whether "auto" takes it, the algorithm, the
// layouts of the filter and of the activations, and whether the epilogue computes statistics.
using Pin = std::tuple<std::string, std::string, std::string, FilterLayout, ActivationLayout, bool>;

struct Choice {
  std::string instance;  // empty: no kernel takes the problem
  std::string choice;    // the instance and its slices, as in the table
  double microseconds = 0;
  std::string automatic;
  Pin pin;
};

Choice Choose(const char* target, const Question& question) {
  const auto& [key, algorithm] = question;
  const bool any = algorithm == "auto";
  ConvProblem problem;
  Gpu gpu;
  Selection selection;
  Status status = ConvProblem::Parse(key, &problem);
  if (status.ok() && !ModelOf(target, &gpu)) status = Status::InvalidArgument("no such GPU");
  if (status.ok()) status = Select(problem, gpu, any ? "native" : algorithm, &selection);
  if (!status.ok()) {
    std::printf("FAIL %s %s: %s\n", target, key.c_str(), status.message().c_str());
    std::exit(1);
  }
  Choice found;
  found.instance = selection.instance;
  found.choice = selection.instance.empty()
                     ? "none"
                     : selection.instance + "/" + std::to_string(selection.slices);
  found.microseconds = selection.microseconds;
  found.automatic = "-";
  if (any) {
    Selection automatic;
    status = Select(problem, gpu, "auto", &automatic);
    found.automatic = automatic.instance.empty() ? "xla" : "=";
  }
  found.pin = {found.instance,        found.automatic,           algorithm,
               problem.filter_layout, problem.activation_layout, problem.epilogue.statistics};
  return found;
}

// The choices for all GPUs, computed once for each question.
const std::vector<Choice>& Choices(const Question& question) {
  static std::map<Question, std::vector<Choice>>& known =
      *new std::map<Question, std::vector<Choice>>;
  auto [found, inserted] = known.try_emplace(question);
  if (inserted) {
    for (const char* gpu : kGpus) found->second.push_back(Choose(gpu, question));
  }
  return found->second;
}

// A family and one of its device kernels.
using Form = std::pair<std::string, std::string>;

Form FormOf(std::string name) {
#define JAXCONV_FORM_TEXT_(text) #text
#define JAXCONV_FORM_TEXT(text) JAXCONV_FORM_TEXT_(text)
#define JAXCONV_FORM_OF(op, dtype, variant, header) \
  {JAXCONV_NAME(op, JAXCONV_FAMILY, dtype, variant), {JAXCONV_FORM_TEXT(JAXCONV_FAMILY), #header}},
  static const std::map<std::string, Form>& forms = *new std::map<std::string, Form>{
#define KERNEL(ops, types, variant, header, ...) \
  JAXCONV_FOR_EACH(ops, types, JAXCONV_FORM_OF, variant, header)
#define PADDED(...)
#define FUSED(...)
#include "cuda/families.def"
  };
  for (const std::string ending : {"_padded", "_fused"}) {
    if (!forms.count(name) && name.size() > ending.size() &&
        name.compare(name.size() - ending.size(), ending.size(), ending) == 0) {
      name.resize(name.size() - ending.size());
    }
  }
  return forms.at(name);
}

// The text of never_chosen.tsv, from the questions of choices.tsv and their sources.
std::string NeverChosen(const std::vector<std::pair<Question, std::string>>& pinned) {
  std::set<Form> all, taken, requested, beside;
  for (const KernelDesc& kernel : Kernels()) all.insert(FormOf(kernel.name));
  for (const auto& [question, source] : pinned) {
    for (const Choice& choice : Choices(question)) {
      if (choice.instance.empty() || choice.automatic == "xla") continue;
      (choice.automatic == "-" ? requested
       : source == kBeside     ? beside
                               : taken)
          .insert(FormOf(choice.instance));
    }
  }
  std::string text =
      "# Written by choices_test --write: the forms, as family and device kernel, that \"auto\" "
      "takes\n"
      "# for no problem of the benches; who takes them otherwise.\n";
  for (const Form& form : all) {
    if (taken.count(form)) continue;
    const char* otherwise = requested.count(form) ? "on request"
                            : beside.count(form)  ? "problems beside the benches"
                                                  : "nobody";
    text += form.first + '\t' + form.second + '\t' + otherwise + '\n';
  }
  return text;
}

bool Agree(double microseconds, double expected) {
  return microseconds <= kMostOff * expected && expected <= kMostOff * microseconds;
}

std::string Tenths(double microseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", microseconds);
  return text;
}

struct Line {
  std::string choice, microseconds, automatic, source;
};

// The contents of choices.tsv: the questions in order, and the lines by GPU and question.
struct Table {
  std::vector<Question> questions;
  std::map<std::tuple<std::string, Question>, Line> lines;
};

Table ReadTable() {
  Table table;
  std::set<Question> seen;
  for (const auto& fields : Read("choices.tsv", 7)) {
    const Question question = {fields[1], fields[2]};
    if (seen.insert(question).second) table.questions.push_back(question);
    table.lines[{fields[0], question}] = {fields[3], fields[4], fields[5], fields[6]};
  }
  return table;
}

// The questions that choices.tsv should have, with their sources: those marked "each", those beside
// the benches, and those marked "first" that the table has already or that add a pin.
std::vector<std::pair<Question, std::string>> Wanted(const std::vector<BenchProblem>& bench,
                                                     const Table& table) {
  std::vector<std::pair<Question, std::string>> wanted;
  std::set<Question> chosen, before(table.questions.begin(), table.questions.end());
  std::set<Pin> pinned;
  auto add = [&](const Question& question) {
    if (!chosen.insert(question).second) return;
    for (const Choice& choice : Choices(question)) pinned.insert(choice.pin);
  };
  for (const BenchProblem& problem : bench) {
    if (problem.each || before.count(problem.question)) add(problem.question);
  }
  std::set<Question> of_bench;
  for (const BenchProblem& problem : bench) of_bench.insert(problem.question);
  std::vector<Question> beside;
  for (const Question& question : table.questions) {
    const auto line = table.lines.find({kGpus[0], question});
    const bool is_beside = line != table.lines.end() && line->second.source == kBeside;
    if (is_beside && !of_bench.count(question)) {
      beside.push_back(question);
      add(question);
    }
  }
  for (const BenchProblem& problem : bench) {
    for (const Choice& choice : Choices(problem.question)) {
      if (!choice.instance.empty() && !pinned.count(choice.pin)) add(problem.question);
    }
  }
  std::set<Question> written;
  for (const bool each : {true, false}) {
    for (const BenchProblem& problem : bench) {
      if (problem.each == each && chosen.count(problem.question) &&
          written.insert(problem.question).second) {
        wanted.push_back({problem.question, problem.source});
      }
    }
  }
  for (const Question& question : beside) wanted.push_back({question, kBeside});
  return wanted;
}

int Write() {
  const Table table = ReadTable();
  std::string text;
  std::ifstream before(FileName("choices.tsv"));
  for (std::string line; std::getline(before, line) && !line.empty() && line[0] == '#';) {
    text += line + '\n';
  }
  before.close();
  const auto wanted = Wanted(BenchProblems(), table);
  for (const auto& [question, source] : wanted) {
    for (size_t i = 0; i < std::size(kGpus); ++i) {
      const Choice& choice = Choices(question)[i];
      std::string microseconds = Tenths(choice.microseconds);
      // A prediction that still agrees keeps its old text, so that few lines differ.
      const auto old = table.lines.find({kGpus[i], question});
      if (old != table.lines.end() && old->second.choice == choice.choice &&
          Agree(choice.microseconds, std::atof(old->second.microseconds.c_str()))) {
        microseconds = old->second.microseconds;
      }
      text += std::string(kGpus[i]) + '\t' + question.first + '\t' + question.second + '\t' +
              choice.choice + '\t' + microseconds + '\t' + choice.automatic + '\t' + source + '\n';
    }
  }
  std::ofstream(FileName("choices.tsv")) << text;
  std::ofstream(FileName("never_chosen.tsv")) << NeverChosen(wanted);
  std::printf("choices_test: wrote %zu problems\n", wanted.size());
  return 0;
}

int Compare() {
  const Table table = ReadTable();
  const std::vector<BenchProblem> bench = BenchProblems();
  int failures = 0;
  for (const auto& [place, line] : table.lines) {
    const auto& [target, question] = place;
    const auto gpu = std::find(std::begin(kGpus), std::end(kGpus), target);
    if (gpu == std::end(kGpus)) {
      std::printf("FAIL %s is no GPU of the table\n", target.c_str());
      ++failures;
      continue;
    }
    const Choice& now = Choices(question)[gpu - kGpus];
    if (now.choice == line.choice && now.automatic == line.automatic &&
        Agree(now.microseconds, std::atof(line.microseconds.c_str()))) {
      continue;
    }
    ++failures;
    std::printf("FAIL %s %s by %s: expected %s in %s us and %s, got %s in %s us and %s\n",
                target.c_str(), question.first.c_str(), question.second.c_str(),
                line.choice.c_str(), line.microseconds.c_str(), line.automatic.c_str(),
                now.choice.c_str(), Tenths(now.microseconds).c_str(), now.automatic.c_str());
  }
  const auto wanted = Wanted(bench, table);
  for (const auto& [question, source] : wanted) {
    for (size_t i = 0; i < std::size(kGpus); ++i) {
      const auto line = table.lines.find({kGpus[i], question});
      if (line != table.lines.end() && line->second.source == source) continue;
      ++failures;
      std::printf("FAIL choices.tsv lacks %s %s by %s of %s, which takes %s: --write adds it\n",
                  kGpus[i], question.first.c_str(), question.second.c_str(), source.c_str(),
                  Choices(question)[i].choice.c_str());
    }
  }
  if (wanted.size() != table.questions.size()) {
    ++failures;
    std::printf("FAIL choices.tsv has %zu problems, %zu of them beside or of the benches\n",
                table.questions.size(), wanted.size());
  }
  std::stringstream never;
  never << std::ifstream(FileName("never_chosen.tsv")).rdbuf();
  if (const std::string expected = NeverChosen(wanted); never.str() != expected) {
    ++failures;
    std::printf("FAIL never_chosen.tsv is\n%sand should be\n%s", never.str().c_str(),
                expected.c_str());
  }
  std::printf("%s: %zu lines, %zu problems of the benches, %d failures\n", Folder().c_str(),
              table.lines.size(), bench.size(), failures);
  return failures != 0 || table.lines.empty() || bench.empty();
}

void AnswerOfPass(const std::string& key, const Gpu& gpu) {
  PassPlan plan;
  const Status status = PlanPass(key, gpu, &plan);
  if (!status.ok()) {
    std::cout << '!' << status.message() << std::endl;
    return;
  }
  std::cout << plan.kernel << '\t' << plan.reason << '\t' << plan.parts << '\t' << plan.block_rows
            << '\t' << plan.microseconds << std::endl;
}

// Names and terms of the calibration's line: of XLA's convolution for the instance "xla", otherwise of
// the instance's plan with these slices. Empty names where XLA is no candidate or the family has none.
Status AnswerOfTerms(const ConvProblem& problem, const Gpu& gpu, const std::string& asked) {
  XlaTerms terms;
  if (asked == "xla") {
    if (!XlaTermsOf(problem, gpu, &terms)) terms = XlaTerms();
  } else {
    const size_t slash = asked.rfind('/');
    const std::string name = asked.substr(0, slash);
    const KernelDesc* kernel = FindKernel(name);
    if (kernel == nullptr) return Status::InvalidArgument("no instance " + name);
    Plan plan;
    const int64_t slices = std::atoi(asked.substr(slash + 1).c_str());
    if (Status status = MakePlan(*kernel, problem, gpu, slices, &plan); !status.ok()) return status;
    terms = {plan.form.form, plan.form.operations, plan.form.operands, plan.terms};
  }
  const TimeTerms& time = terms.time;
  std::cout << terms.form << '\t' << terms.operations << '\t' << terms.operands << '\t'
            << time.tensor_cores << '\t' << time.loads << '\t' << time.stores << '\t' << time.dram
            << '\t' << time.launch << std::endl;
  return {};
}

// Answers with the fields that the Python module of a platform returns: instance, workspace bytes,
// slices, the predicted times of the instance and of XLA, refusals; "!" and a message for an error.
int Answer() {
  for (std::string line; std::getline(std::cin, line);) {
    const std::vector<std::string> asked = Split(line, '\t');
    ConvProblem problem;
    Gpu gpu;
    Selection selection;
    Status status = Status::InvalidArgument("expected GPU, key and algorithm, got " + line);
    if (asked.size() == 3 && ModelOf(asked[0], &gpu)) {
      if (asked[2] == "pass") {
        AnswerOfPass(asked[1], gpu);
        continue;
      }
      status = ConvProblem::Parse(asked[1], &problem);
      if (status.ok() && asked[2].rfind(kTerms, 0) == 0) {
        status = AnswerOfTerms(problem, gpu, asked[2].substr(kTerms.size()));
        if (status.ok()) continue;
      }
    }
    if (status.ok()) status = Select(problem, gpu, asked[2], &selection);
    if (status.ok()) {
      std::cout << selection.instance << '\t' << selection.workspace_bytes << '\t'
                << selection.slices << '\t' << selection.microseconds << '\t'
                << selection.xla_microseconds;
      for (const Refusal& refusal : selection.refusals) {
        std::cout << '\t' << refusal.kernel << '\t' << refusal.reason;
      }
      std::cout << std::endl;
    } else {
      std::cout << '!' << status.message() << std::endl;
    }
  }
  return 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) {
  const std::string mode = argc > 1 && argv[1][0] == '-' ? argv[1] : "";
  int folder = mode.empty() ? 1 : 2;
  if (argc > folder) jaxconv::Folder() = argv[folder];
  if (mode == "--select") return jaxconv::Answer();
  if (mode == "--write") return jaxconv::Write();
  int status = jaxconv::Compare();
  while (++folder < argc) {
    jaxconv::Folder() = argv[folder];
    status |= jaxconv::Compare();
  }
  return status;
}
